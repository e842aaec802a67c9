"""Formats and rules of a frozen base that lies packed in memory (model.base), and is unpacked for each product.

    format_of(run)           what each number of a frozen matrix takes; None where the base lies in train.precision
    is_packed(run, layer)    whether a layer's matrices are among those that model.pack names
    is_same(scheme, form)    whether a release has the codes and the blocks of a format, so that they are taken over
    once_rounded(run, ...)   whether such a release was rounded anew, before that
    merges_onto(run)         whether an export has those numbers too
    contradictions(run)      (key, problem); conf/rules/contradictions.py asks
    missing(run, facts)      parts that are to be packed, and the model has not; conf/rules/model.py asks
    widths(run, facts)       sizes that the format needs as a multiple of something; conf/rules/model.py asks

A matrix is one of Megatron's layers, as the base holds it whole: gate and up are two. Its blocks do not depend on how
ranks cut it, so neither does what is trained on it. Embeddings, norms, routers, biases and the output layer stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conf.model_facts import ModelFacts
from conf.model_files import quantization
from conf.model_files.quantization import Scheme
from conf.schema.run import Run


@dataclass(frozen=True)
class Format:
    """Codes of so many bits, and a scale for each block of rows and columns."""

    kind: str  # as conf/model_files/quantization.py names it
    bits: int
    block: tuple[int, int]
    scale_bytes: int
    factor_bytes: int = 0  # of what multiplies all scales of a matrix

    @property
    def bytes(self) -> float:
        """Bytes of a number, with its share of the block's scale."""
        return self.bits / 8 + self.scale_bytes / (self.block[0] * self.block[1])


# Blocks as DeepSeek-V3 is released in FP8, and groups as Kimi-K2-Thinking is in 4 bits; and those of NVIDIA's GPUs.
FORMATS = {
    "fp8": Format("fp8", 8, (128, 128), 4),
    "int4": Format("int", 4, (1, 32), 2),
    "nvfp4": Format("nvfp4", 4, (1, 16), 1, 4),
    "mxfp4": Format("mxfp4", 4, (1, 32), 1),
}
ROUNDED = ("fp8", "int4")  # formats that were there before a release in them was taken over
PARTS = ("experts", "attention", "dense")  # that model.pack chooses from
COLUMNS = 8  # of a rank's part of a matrix: 4 bits of each fill a word of 32


def format_of(run: Run) -> Format | None:
    return FORMATS.get(run.model.base)


def parts(run: Run) -> tuple[str, ...]:
    """Parts of the model whose matrices are packed, where any are."""
    return run.model.pack or PARTS


def is_packed(run: Run, layer: str) -> bool:
    """Whether the matrices of this layer, by Megatron's name, are among those that model.pack names."""
    part = "experts" if ".experts." in layer else "attention" if ".self_attention." in layer else "dense"
    return part in parts(run)


def is_same(scheme: Scheme, form: Format) -> bool:
    return (scheme.kind, scheme.bits, scheme.block) == (form.kind, form.bits, form.block)


def once_rounded(run: Run, config: dict[str, Any]) -> bool:
    """Whether a training on a release of this config.json had other numbers up to 23 November 2026."""
    form = format_of(run)
    try:
        scheme = quantization.scheme(config)
    except ValueError:  # no release that is read
        return False
    if form is None or scheme is None or run.model.base not in ROUNDED or not is_same(scheme, form):
        return False
    return form.kind == "fp8" or scheme.dtype == "BF16"  # the type of INT4's scales, which has to be the format's


def merges_onto(run: Run) -> bool:
    """Whether the exported model has the numbers of the packed base, as training had them."""
    return format_of(run) is not None and run.export.merge_onto == "packed"


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    base, kind = run.model.base, run.adapter.kind
    if run.export.merge_onto == "packed":
        yield from _unmerged(run)
    if format_of(run) is None:
        if run.convert.to == "packed":
            yield "convert.to", f"packed, but model.base is {base}; torch_dist, or model.base fp8, int4, nvfp4 or mxfp4"
        if run.model.pack is not None:
            yield "model.pack", f"has no effect with model.base {base}"
        return
    if kind == "none":
        yield "model.base", f"{base}, but adapter.kind is none: weights that are trained cannot lie packed; bf16"
    if kind == "dora":
        yield "model.base", f"{base}, but dora takes norms of the weights; bf16, or adapter.kind lora"
    if run.train.fp8:
        yield "model.base", f"{base}, but train.fp8 {run.train.fp8} keeps its own copies of the weights; bf16, or null"
    if run.reinforce.steps:
        yield (
            "model.base",
            f"{base}, but reinforce.steps {run.reinforce.steps} samples from the weights themselves; bf16",
        )


def _unmerged(run: Run) -> Iterator[tuple[str, str]]:
    """Yield reasons why nothing is merged onto the packed weights."""
    key, export = "export.merge_onto", run.export
    if format_of(run) is None:
        yield key, f"packed, but model.base is {run.model.base}, and nothing is packed; released"
    if "merged" not in (export.formats or ("merged",)):
        yield key, "packed, but export.formats lacks merged; released"
    if export.quantization:
        yield key, f"packed, but export.quantization {export.quantization} keeps the release's codes; released, or null"
    if export.checkpoint == "base":
        yield key, "packed, but export.checkpoint is base, which has no adapter; released"
    if run.evaluate.adapter != "merged" and run.evaluate.tasks:
        yield key, f"packed, but evaluate.adapter {run.evaluate.adapter} serves the released weights; released"


def missing(run: Run, facts: ModelFacts) -> list[str]:
    """Parts that model.pack names, and the model has not."""
    dense = "dense" in facts.kinds or facts.shared_ffn or (facts.mtp_layers and run.model.mtp)
    there = {"experts": facts.experts, "attention": True, "dense": dense}
    return [part for part in run.model.pack or () if not there[part]]


def widths(run: Run, facts: ModelFacts) -> Iterator[tuple[str, str, int, int]]:
    """Columns of a rank's part that 4 bits cannot hold: (key, what, size, the number that has to divide it)."""
    form = format_of(run)
    if form is None or form.bits != 4:
        return
    layout, heads = run.layout, facts.heads * (facts.v_head if facts.kv_rank else facts.head_dim)
    sizes = [("attention", "layout.tp", "attention's output over tp", heads // layout.tp)]
    sizes += [("dense", "layout.tp", "dense layers' width over tp", facts.ffn // layout.tp)]
    sizes += [("dense", "layout.tp", "shared experts' width over tp", facts.shared_ffn // layout.tp)]
    sizes += [("experts", "layout.etp", "experts' width over etp", facts.expert_ffn // layout.etp)]
    sizes += [(parts(run)[0], "model.base", "hidden size", facts.hidden)]  # which no rank has a part of
    sizes += [("attention", "model.base", "rank of the query", facts.q_rank)]
    sizes += [("attention", "model.base", "rank of key and value", facts.kv_rank)]
    for part, key, what, size in sizes:
        if part in parts(run) and size % COLUMNS:
            yield key, what, size, COLUMNS
