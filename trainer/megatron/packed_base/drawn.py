"""A packed base of random codes, for trials: no checkpoint is read, and no weight is ever there unpacked."""

import torch

from conf.rules.packed_base import Format, format_of
from conf.schema.run import Run
from trainer.megatron import precision
from trainer.megatron.packed_base import weight
from trainer.megatron.packed_base.codes import FP8, SCALES

SPREAD = {"fp8": 150.0, "int": 4.6}  # about the standard deviation of random codes
USUAL = 0.02  # that of a weight


@torch.no_grad()
def draw(run: Run, chunks: list) -> None:
    form, dtype = format_of(run), precision.dtype(run.train.precision)
    assert form, "model.base says how"
    for chunk in chunks:
        for _, layer, names in [*weight.layers(chunk)]:
            shape = tuple(layer._parameters[names[0]].shape)  # pyright: ignore[reportOptionalMemberAccess]
            weight.attach(layer, names, store(form, len(names), shape, dtype))
        weight.fill(chunk, start=True)


def store(form: Format, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> weight.Store:
    """Random codes, but for those that are no numbers, with one scale."""
    (rows, columns), (height, width) = shape, form.block
    codes = torch.randint(0, 256, (count, rows, columns * form.bits // 8), dtype=torch.uint8, device="cuda")
    if form.kind == "fp8":
        codes = torch.where(codes & 0x7F == 0x7F, 0x38, codes).view(FP8)
    blocks = (count, -(-rows // height), -(-columns // width))
    scales = torch.full(blocks, USUAL / SPREAD[form.kind], dtype=SCALES[form.kind], device="cuda")
    return weight.Store(codes, scales, form.block, dtype)
