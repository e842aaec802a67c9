"""Formats and rules of a frozen base that is packed in memory (model.base), and unpacked for each product.

    format_of(run)           format of the packed matrices; None if the base has train.precision
    is_packed(run, layer)    whether model.pack includes a layer's matrices
    is_same(scheme, form)    whether a release has the codes and blocks of a format and is used without rounding
    once_rounded(run, ...)   whether earlier versions rounded such a release again
    identity(run)            facts of the codes' version
    merges_onto(run)         whether an export is merged onto the packed numbers
    measures_cost(run, ...)  whether training compares the packed with the unpacked base, before its first step
    measured_batches(run)    micro batches on which it compares them
    is_served(run)           whether vLLM serves the codes, with the adapter not merged
    of_pack(run)             the run that exports the codes in a format of vLLM
    contradictions(run)      (key, problem), for conf/rules/contradictions.py
    missing(run, facts)      parts in model.pack that the model lacks, for conf/rules/model.py
    widths(run, facts)       sizes that the format needs as a multiple of something, for conf/rules/model.py

A matrix is a complete matrix of a Megatron layer; gate and up are two. Its blocks are the same however ranks cut it, so
the training does not depend on the layout. Embeddings, norms, routers, biases and the output layer are not packed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from conf.model_facts import ModelFacts
from conf.model_files import quantization
from conf.model_files.quantization import Scheme
from conf.schema.run import Run


@dataclass(frozen=True)
class Format:
    """Codes of `bits` bits, and a scale for each block of rows and columns."""

    kind: str  # as in conf/model_files/quantization.py
    bits: int
    block: tuple[int, int]
    scale_bytes: int
    factor_bytes: int = 0  # bytes of the common factor of all scales of a matrix

    @property
    def bytes(self) -> float:
        """Bytes per number, with its share of the block's scale."""
        return self.bits / 8 + self.scale_bytes / (self.block[0] * self.block[1])


# Blocks of models released in FP8 and in 4 bits, and of NVIDIA's GPUs.
FORMATS = {
    "fp8": Format("fp8", 8, (128, 128), 4),
    "int4": Format("int", 4, (1, 32), 2),
    "nvfp4": Format("nvfp4", 4, (1, 16), 1, 4),
    "mxfp4": Format("mxfp4", 4, (1, 32), 1),
}
ROUNDED = ("fp8", "int4")  # formats for which earlier versions rounded every release
PARTS = ("experts", "attention", "dense")  # choices of model.pack
MEASURED = 2**12  # tokens on which the packed and the unpacked base are compared, at least
COLUMNS = 8  # the columns of a rank's part must be a multiple: 8 codes of 4 bits fill a word of 32


def format_of(run: Run) -> Format | None:
    return FORMATS.get(run.model.base)


def parts(run: Run) -> tuple[str, ...]:
    """Parts of the model whose matrices are packed, if the base is packed."""
    return run.model.pack or PARTS


def is_packed(run: Run, layer: str) -> bool:
    """Whether model.pack includes the matrices of this layer, by Megatron's name."""
    kind = "experts" if ".experts." in layer else "attention" if ".self_attention." in layer else ""
    return part_of(kind) in parts(run)


def part_of(kind: str) -> str:
    """The part of the model with this kind of matrices."""
    return kind if kind in PARTS else "dense"


def measures_cost(run: Run, quantised: bool) -> bool:
    """Whether training also computes the loss of the unpacked base. `quantised`: whether the release is."""
    if run.log.packing_cost is not None:
        return run.log.packing_cost and format_of(run) is not None
    return format_of(run) is not None and (not quantised or run.convert.to == "torch_dist")


def measured_batches(run: Run) -> int:
    """Micro batches of a rank on which training compares both bases; the unpacked base is read once for each."""
    layout = run.layout
    ranks = layout.world // (layout.tp * layout.cp * layout.pp)
    return ceil(MEASURED / (ranks * run.train.micro_batch * run.data.seq_length))


def is_same(scheme: Scheme, form: Format) -> bool:
    return (scheme.kind, scheme.bits, scheme.block) == (form.kind, form.bits, form.block)


def once_rounded(run: Run, config: dict[str, Any]) -> bool:
    """Whether versions before 24 November 2026 rounded a release with this config.json again."""
    form = format_of(run)
    try:
        scheme = quantization.scheme(config)
    except ValueError:  # an unsupported release
        return False
    if form is None or scheme is None or run.model.base not in ROUNDED or not is_same(scheme, form):
        return False
    return form.kind == "fp8" or scheme.dtype == "BF16"  # INT4's scales must have the format's type


def identity(run: Run) -> dict[str, str]:
    """Facts that the codes depend on, as they differ between versions."""
    return {"factors": "of gate and up"} if run.model.base == "nvfp4" else {}  # until 26 November 2026: one for each


def merges_onto(run: Run) -> bool:
    """Whether the exported model is merged onto the numbers of the packed base, as in training."""
    return format_of(run) is not None and run.export.merge_onto == "packed"


def is_served(run: Run) -> bool:
    return run.evaluate.adapter == "packed"


def of_pack(run: Run) -> Run:
    export = {"checkpoint": "base", "formats": ("merged",), "quantization": "packed"}
    export |= {"weights": "trained", "merge_onto": "released"}
    return run.changed(export=export, evaluate={"adapter": "merged", "tasks": ()})


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    base, kind = run.model.base, run.adapter.kind
    if is_served(run) or run.export.quantization == "packed":
        yield from _unserved(run)
    if run.export.merge_onto == "packed":
        yield from _unmerged(run)
    if format_of(run) is None:
        if run.convert.to == "packed":
            yield "convert.to", f"packed, but model.base is {base}; torch_dist, or model.base fp8, int4, nvfp4 or mxfp4"
        if run.model.pack is not None:
            yield "model.pack", f"has no effect with model.base {base}"
        return
    if kind == "none":
        yield "model.base", f"{base}, but adapter.kind is none: trained weights cannot be packed; bf16"
    if kind == "dora":
        yield "model.base", f"{base}, but dora needs norms of the weights; bf16, or adapter.kind lora"
    if run.train.fp8:
        yield "model.base", f"{base}, but train.fp8 {run.train.fp8} keeps other copies of the weights; bf16, or null"
    if run.reinforce.steps:
        yield "model.base", f"{base}, but reinforce.steps {run.reinforce.steps} samples from unpacked weights; bf16"


def _unserved(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why the codes cannot be written for vLLM."""
    key = "evaluate.adapter" if is_served(run) else "export.quantization"
    if format_of(run) is None:
        yield key, f"packed, but model.base is {run.model.base}; model.base {', '.join(FORMATS)}"
    elif run.convert.to != "packed":
        yield key, f"packed, but convert.to {run.convert.to} keeps no codes; convert.to=packed"
    if run.export.quantization == "packed" and run.export.checkpoint != "base":
        text = f"packed, but export.checkpoint {run.export.checkpoint} has an adapter, which codes cannot hold; base"
        yield "export.quantization", f"{text}, or evaluate.adapter=packed serves it next to the codes"


def _unmerged(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why no adapter is merged onto the packed weights."""
    key, export = "export.merge_onto", run.export
    if format_of(run) is None:
        yield key, f"packed, but model.base {run.model.base} is not packed; released"
    if "merged" not in (export.formats or ("merged",)):
        yield key, "packed, but export.formats lacks merged; released"
    if export.quantization:
        yield key, f"packed, but export.quantization {export.quantization} merges onto the release; released, or null"
    if export.checkpoint == "base":
        yield key, "packed, but export.checkpoint is base, which has no adapter; released"
    if run.evaluate.adapter != "merged" and run.evaluate.tasks:
        yield key, f"packed, but evaluate.adapter {run.evaluate.adapter} serves no merged model; released"


def missing(run: Run, facts: ModelFacts) -> list[str]:
    """Parts in model.pack that the model lacks."""
    dense = facts.ffn or facts.shared_ffn or (facts.mtp_layers and run.model.mtp)
    present = {"experts": facts.experts, "attention": True, "dense": dense}
    return [part for part in run.model.pack or () if not present[part]]


def widths(run: Run, facts: ModelFacts) -> Iterator[tuple[str, str, int, int]]:
    """Widths of a rank's part that 4 bits do not allow: (key, what, size, the number that must divide it)."""
    form = format_of(run)
    if form is None or form.bits != 4:
        return
    layout, sizes = run.layout, []
    for of in facts.variants:
        heads = of.heads * (of.v_head if of.kv_rank else of.head_dim)
        sizes += [("attention", "layout.tp", "attention's output over tp", heads // layout.tp)]
        sizes += [("dense", "layout.tp", "dense layers' width over tp", of.ffn // layout.tp)]
    sizes += [("dense", "layout.tp", "shared experts' width over tp", facts.shared_ffn // layout.tp)]
    sizes += [("experts", "layout.etp", "experts' width over etp", facts.expert_ffn // layout.etp)]
    sizes += [(parts(run)[0], "model.base", "hidden size", facts.hidden)]  # not cut over ranks
    sizes += [("attention", "model.base", "rank of the query", facts.q_rank)]
    sizes += [("attention", "model.base", "rank of key and value", facts.kv_rank)]
    for part, key, what, size in sizes:
        if part in parts(run) and size % COLUMNS:
            yield key, what, size, COLUMNS
