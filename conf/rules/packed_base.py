"""Formats and rules of a frozen base that lies packed in memory (model.base), and is unpacked for each product.

    format_of(run)           what each number of a frozen matrix takes; None where the base lies in train.precision
    contradictions(run)      (key, problem); conf/rules/contradictions.py asks
    widths(run, facts)       sizes that the format needs as a multiple of something; conf/rules/layout.py asks

A matrix is one of Megatron's layers, as the base holds it whole: gate and up are two. Its blocks do not depend on how
ranks cut it, so neither does what is trained on it. Embeddings, norms, routers, biases and the output layer stay.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from conf.model_facts import ModelFacts
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
COLUMNS = 8  # of a rank's part of a matrix: 4 bits of each fill a word of 32


def format_of(run: Run) -> Format | None:
    return FORMATS.get(run.model.base)


def contradictions(run: Run) -> Iterator[tuple[str, str]]:
    base, kind = run.model.base, run.adapter.kind
    if format_of(run) is None:
        if run.convert.to == "packed":
            yield "convert.to", f"packed, but model.base is {base}; torch_dist, or model.base fp8, int4, nvfp4 or mxfp4"
        return
    if kind == "none":
        yield "model.base", f"{base}, but adapter.kind is none: weights that are trained cannot lie packed; bf16"
    if kind == "dora":
        yield "model.base", f"{base}, but dora takes norms of the weights; bf16, or adapter.kind lora"
    if run.train.fp8:
        yield "model.base", f"{base}, but train.fp8 {run.train.fp8} keeps its own copies of the weights; bf16, or null"
    if run.train.objective == "dpo":
        yield "model.base", f"{base}, but train.objective dpo compares with the base as it is; bf16"
    if run.convert.to == "packed" and run.train.objective == "distill":
        yield "convert.to", "packed, but train.objective distill reads its teacher's base as it is; none"
    if run.reinforce.steps:
        yield (
            "model.base",
            f"{base}, but reinforce.steps {run.reinforce.steps} samples from the weights themselves; bf16",
        )


def widths(run: Run, facts: ModelFacts) -> Iterator[tuple[str, str, int, int]]:
    """Sizes of a rank's part that 4 bits cannot hold: (key, what, size, the number that has to divide it)."""
    form = format_of(run)
    if form is None or form.bits != 4:
        return
    layout, heads = run.layout, facts.heads * (facts.v_head if facts.kv_rank else facts.head_dim)
    sizes = [("layout.tp", "attention's output over tp", heads // layout.tp)]
    sizes += [("layout.tp", "dense layers' width over tp", facts.ffn // layout.tp)]
    sizes += [("layout.tp", "shared experts' width over tp", facts.shared_ffn // layout.tp)]
    sizes += [("layout.etp", "experts' width over etp", facts.expert_ffn // layout.etp)] if facts.experts else []
    for key, what, size in sizes:
        if size % COLUMNS:
            yield key, what, size, COLUMNS
