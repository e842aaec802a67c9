"""Unpack quantised weights: conf/model_files/quantization.py describes the formats, released_tensors.py reads the
parts.

Only a few rows at a time are in fp32. Products are in fp32 and rounded once, to the type in config.json, as in
transformers. If a weight ends within a block, its last block is shorter, as in DeepSeek-V3's own code; transformers
5.12 raises an error or distributes the scales evenly.
"""

# pyright: reportArgumentType=false

from math import prod

import torch

from conf.model_files.quantization import MX, Packed, Scheme, blocks
from trainer.megatron.packed_base import codes as of_codes

AT_ONCE = 2**24  # fp32 values at a time


def unpack(
    packed: Packed, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, first: int = 0
) -> torch.Tensor:
    """Return the weight, or the rows of `codes` from `first` on. The scales are those of all rows."""
    scheme = packed.scheme
    if scheme.stacked:
        return _unpack_mxfp4(codes, scales[first : first + len(codes)], dtype)
    whole = torch.empty((len(codes), packed.shape[1]), dtype=dtype)
    scales = of_codes.in_fp32(scales).view(grid(packed))
    for start, stop in spans(packed, first, first + len(codes)):
        part = codes[start - first : stop - first]
        numbers = _numbers(part, scheme)
        whole[start - first : stop - first] = numbers * spread(scales, packed, start, stop)
    return whole


def grid(packed: Packed) -> tuple[int, int]:
    """Return the rows and columns of scales."""
    rows, columns = (blocks(size, block) for size, block in zip(packed.shape, packed.scheme.block, strict=True))
    return rows, columns


def spans(packed: Packed, first: int, last: int):
    """Yield parts of these rows, each small enough for fp32; all but the first begin with a block."""
    height = min(packed.scheme.block[0], packed.shape[0]) or 1
    step = max(1, AT_ONCE // max(1, height * packed.shape[1])) * height
    while first < last:
        stop = min(last, (first // height) * height + step)
        yield first, stop
        first = stop


def spread(scales: torch.Tensor, packed: Packed, start: int, stop: int) -> torch.Tensor:
    """Return the scales of these rows, one per value."""
    height, width = (min(sizes) for sizes in zip(packed.scheme.block, packed.shape, strict=True))  # may be "all"
    first = start // height
    of_rows = scales[first : -(-stop // height)].repeat_interleave(height, 0)[start - first * height :][: stop - start]
    return of_rows.repeat_interleave(width, 1)[:, : packed.shape[1]]


def _numbers(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the values of codes. Integers are packed into 32 bits, the first in the lowest, stored without sign."""
    if scheme.kind != "int":
        return of_codes.numbers(codes, scheme.kind)
    parts = codes.view(torch.uint8)
    return of_codes.numbers(parts, "int") if scheme.bits == 4 else parts.float() - 128


def _unpack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.empty((codes.shape[0], prod(codes.shape[2:]) * 2, codes.shape[1]), dtype=dtype)
    for expert, (of_expert, exponents) in enumerate(zip(codes, scales, strict=True)):
        numbers = of_codes.numbers(of_expert.flatten(1), "mxfp4").to(dtype).unflatten(1, (-1, MX))
        whole[expert] = torch.ldexp(numbers, exponents.int().unsqueeze(-1) - 127).flatten(1).t()
    return whole
