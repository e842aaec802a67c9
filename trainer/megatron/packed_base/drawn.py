"""A packed base of random codes, for trials: no checkpoint is read, and no weight is stored unpacked."""

from math import log2

import torch

from conf.rules.packed_base import FORMATS, Format
from conf.schema.run import Run
from trainer.megatron import precision
from trainer.megatron.packed_base import weight
from trainer.megatron.packed_base.codes import BIAS, FP8, SCALES

# About the standard deviation of random codes.
SPREAD = {"fp8": 150.0, "int": 4.6, "nvfp4": 2.9, "mxfp4": 2.9}


@torch.no_grad()
def draw(run: Run, chunks: list) -> None:
    form, dtype = FORMATS[run.model.base], precision.dtype(run.train.precision)
    for chunk in chunks:
        gated = chunk.config.gated_linear_unit  # gate and up are two stacked matrices
        for name, layer, names in [*weight.layers(chunk, run)]:
            shape = tuple(layer._parameters[names[0]].shape)  # pyright: ignore[reportOptionalMemberAccess]
            below = 2 if gated and "linear_fc1" in name else 1
            weight.attach(layer, names, store(form, len(names), shape, dtype, below))
        weight.fill(chunk, start=True)


def store(form: Format, count: int, shape: tuple[int, ...], dtype: torch.dtype, below: int = 1) -> weight.Store:
    """Return random codes without NaN and one scale value; `below` matrices are stacked in each weight."""
    (rows, columns), (height, width) = shape, form.block
    codes = torch.randint(0, 256, (count, rows, columns * form.bits // 8), dtype=torch.uint8, device="cuda")
    if form.kind == "fp8":
        codes = torch.where(codes & 0x7F == 0x7F, 0x38, codes).view(FP8)
    blocks = (count, -(-rows // height), -(-columns // width))
    usual, factors = weight.USUAL / SPREAD[form.kind], None
    if form.factor_bytes:
        factors, usual = torch.full((count, below), usual, device="cuda"), 1.0
    if form.kind == "mxfp4":
        usual = BIAS + round(log2(usual))
    scales = torch.full(blocks, usual, dtype=SCALES[form.kind], device="cuda")
    return weight.Store(codes, scales, form.block, dtype, factors)
