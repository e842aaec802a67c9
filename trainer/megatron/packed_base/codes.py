"""Weights of codes and scales, unpacked: those of all experts of a layer at once.

    unpack(codes, scales, block, dtype) -> weights     [n, out, in]

Codes are [n, out, in] in FP8 (e4m3), or [n, out, in / 2] in bytes of two integers of 4 bits, the even column's in the
low bits, each 8 above what it stands for. Scales are [n, rows, columns] of blocks, of which the last may be shorter.
Products are in fp32, and rounded once, to the type that is asked for. On a GPU kernel.py does the same
in one pass.
"""

import torch

MIDDLE = 8  # of the integers of 4 bits
FP8 = torch.float8_e4m3fn
SCALES = {"fp8": torch.float32, "int": torch.bfloat16}  # their type, by the kind of conf/rules/packed_base.py
AT_ONCE = 2**26  # numbers in fp32


def shape_of(codes: torch.Tensor) -> tuple[int, int, int]:
    count, rows, columns = codes.shape
    return count, rows, columns if codes.dtype == FP8 else 2 * columns


def unpack(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    count, rows, columns = shape_of(codes)
    whole = torch.empty((count, rows, columns), dtype=dtype, device=codes.device)
    each = max(1, AT_ONCE // (block[0] * columns)) * block[0]
    for weight, of_weight, to in zip(codes, scales, whole, strict=True):
        for start in range(0, rows, each):
            part = weight[start : start + each]
            of_part = of_weight[start // block[0] : -(-(start + len(part)) // block[0])].float()
            spread = of_part.repeat_interleave(block[0], 0)[: len(part)].repeat_interleave(block[1], 1)[:, :columns]
            to[start : start + each] = _numbers(part) * spread
    return whole


def _numbers(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype == FP8:
        return codes.float()
    return torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - MIDDLE
