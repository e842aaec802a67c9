"""Unpack weights that are stored as codes and scales, all experts of a layer at once.

    unpack(store) -> weights     [n, out, in]

Codes are [n, out, in] in FP8 (e4m3), or [n, out, in / 2] in bytes of two 4-bit codes, the even column's in the low
bits. Scales are [n, rows, columns] of blocks (the last may be smaller); their type determines the 4-bit format:

    bf16    int      integers, stored with 8 added
    e4m3    nvfp4    e2m1; all scales of a matrix also share a factor
    bytes   mxfp4    e2m1; a scale is an exponent of 2, stored with 127 added

Factors are [n, k] in fp32: for k stacked matrices with equal numbers of rows. Products are in fp32: first scale times
factor, then the code; the result is rounded once, to the requested type. kernel.py does the same on a GPU in one pass.
"""

from dataclasses import dataclass

import torch

from conf.model_files.quantization import E2M1

MIDDLE = 8  # added to 4-bit integers
BIAS = 127  # added to exponents stored in a byte
FP8 = torch.float8_e4m3fn
# Types of scales by kind (conf/rules/packed_base.py).
SCALES = {"fp8": torch.float32, "int": torch.bfloat16, "nvfp4": FP8, "mxfp4": torch.uint8}
PAIRS = torch.tensor([(low, high) for high in E2M1 for low in E2M1])  # of each byte
AT_ONCE = 2**18  # fp32 values unpacked at a time: they fit into a CPU's cache


@dataclass(frozen=True)
class Codes:
    """Codes and scales of all matrices of one layer. It is not a module, so casts of the model do not change the
    scales.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]  # rows and columns that share a scale
    dtype: torch.dtype  # of the weights
    factors: torch.Tensor | None = None  # of all scales of a matrix, if the format has them

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (self.factors.nbytes if self.factors is not None else 0)


def shape_of(codes: torch.Tensor) -> tuple[int, int, int]:
    count, rows, columns = codes.shape
    return count, rows, columns if codes.dtype == FP8 else 2 * columns


def kind_of(codes: torch.Tensor, scales: torch.Tensor) -> str:
    return "fp8" if codes.dtype == FP8 else next(kind for kind, dtype in SCALES.items() if dtype == scales.dtype)


def unpack(store: Codes) -> torch.Tensor:
    codes, block, factors = store.codes, store.block, store.factors
    count, rows, columns = shape_of(codes)
    kind, scales = kind_of(codes, store.scales), in_fp32(store.scales)
    if factors is not None:
        assert rows % factors.shape[1] == 0 and block[0] == 1, "stacked matrices have equal numbers of rows"
        scales = scales * factors.repeat_interleave(rows // factors.shape[1], 1).unsqueeze(-1)
    whole = torch.empty((count, rows, columns), dtype=store.dtype, device=codes.device)
    each = max(1, AT_ONCE // (block[0] * columns)) * block[0]
    for weight, of_weight, target in zip(codes, scales, whole, strict=True):
        for start in range(0, rows, each):
            part = weight[start : start + each]
            of_part = of_weight[start // block[0] : -(-(start + len(part)) // block[0])]
            spread = of_part.repeat_interleave(block[0], 0)[: len(part)].repeat_interleave(block[1], 1)[:, :columns]
            target[start : start + each] = numbers(part, kind) * spread
    return whole


def in_fp32(scales: torch.Tensor) -> torch.Tensor:
    return (scales.int() << 23).view(torch.float32) if scales.dtype == torch.uint8 else scales.float()


def numbers(codes: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "fp8":
        return codes.float()
    if kind == "int":
        return torch.stack((codes & 15, codes >> 4), -1).flatten(1).float() - MIDDLE
    return torch.nn.functional.embedding(codes.int(), PAIRS.to(codes.device)).flatten(1)
