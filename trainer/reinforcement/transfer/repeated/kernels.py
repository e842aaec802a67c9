"""Kernels for whole buckets on a GPU: one pass over memory and one launch for hundreds of tensors.

Tables on the GPU have the addresses of the tensors. A launch for each tensor would take longer than copying it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trainer.reinforcement.transfer.repeated.recipes import Merged

TALL, WIDE, WARPS = 64, 128, 8  # of a tile for merging
LEAST, DEEPEST = 16, 32  # limits of the part of a rank that a product takes at once
AT_ONCE = 4096  # words that a program copies
ALIGNED = 16  # bytes; source and destination of a matrix must begin at a multiple of it
TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Merges:
    """Matrices of one kind, each with a low-rank adapter: base + scale * b @ a, in fp32, rounded to the base's type."""

    def __init__(self, places: Sequence[int], each: Sequence[Merged]):
        self.each, (base, a, b) = each, each[0].parts  # kept to keep their memory
        # The table has offsets relative to the kernel's arguments, so that the kernel loads eight numbers at once. With
        # absolute addresses in the table, it would load them one by one.
        pairs = zip(places, each, strict=True)
        rows = [[*map(_offset, merged.parts, each[0].parts), place] for place, merged in pairs]
        self.table = torch.tensor(rows, dtype=torch.int64).to(base.device)
        (rows, columns), rank = base.shape, a.shape[0]
        self.grid = len(each), triton.cdiv(rows, TALL), triton.cdiv(columns, WIDE)
        deep = min(DEEPEST, max(LEAST, triton.next_power_of_2(rank)))
        strides = base.stride(0), a.stride(0), b.stride(0)
        together = [ALIGNED // part.element_size() for part in (base, a, b)]
        self.sizes = rows, columns, rank, each[0].scale, *strides, deep, TALL, WIDE, *together

    @staticmethod
    def kind(place: int, merged: Merged) -> tuple | None:
        """Key of the matrices that can be merged in one launch; None if this one cannot be merged to this byte."""
        if place % ALIGNED or any(part.dtype not in TYPES or part.data_ptr() % ALIGNED for part in merged.parts):
            return None
        return merged.scale, *((*part.shape, part.stride(0), part.dtype) for part in merged.parts)

    def fill(self, memory: torch.Tensor) -> None:
        """Write all merged matrices to the bucket."""
        _merge[self.grid](self.table, *self.each[0].parts, memory, *self.sizes, num_warps=WARPS)


def _offset(tensor: torch.Tensor, first: torch.Tensor) -> int:
    return (tensor.data_ptr() - first.data_ptr()) // first.element_size()


@triton.jit
def _merge(
    table,
    bases,
    all_a,
    all_b,
    memory,
    rows,
    columns,
    rank,
    scale,
    base_stride,
    a_stride,
    b_stride,
    DEEP: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    OF_BASE: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
):
    own = table + tl.program_id(0) * 4
    base = bases + tl.multiple_of(tl.load(own), OF_BASE)
    a = all_a + tl.multiple_of(tl.load(own + 1), OF_A)
    b = all_b + tl.multiple_of(tl.load(own + 2), OF_B)
    out = (memory + tl.multiple_of(tl.load(own + 3), 16)).to(bases.dtype)
    row = (tl.program_id(1) * TALL + tl.arange(0, TALL))[:, None]
    column = (tl.program_id(2) * WIDE + tl.arange(0, WIDE))[None, :]
    inside = (row < rows) & (column < columns)
    whole = tl.load(base + row.to(tl.int64) * base_stride + column, mask=inside, other=0.0).to(tl.float32)
    change = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, rank, DEEP):
        depth = start + tl.arange(0, DEEP)
        left_known = (row < rows) & (depth < rank)[None, :]
        left = tl.load(b + row.to(tl.int64) * b_stride + depth[None, :], mask=left_known, other=0.0)
        right_known = (depth < rank)[:, None] & (column < columns)
        right = tl.load(a + depth[:, None] * a_stride + column, mask=right_known, other=0.0)
        change += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    tl.store(
        out + row.to(tl.int64) * columns + column, (whole + change * scale).to(bases.dtype.element_ty), mask=inside
    )


class Copies:
    """Tensors that are contiguous in a bucket and elsewhere, and are copied in words of 8 bytes in either direction."""

    def __init__(self, places: Sequence[int], tensors: Sequence[torch.Tensor]):
        words = [tensor.numel() * tensor.element_size() // 8 for tensor in tensors]
        columns = zip(places, tensors, words, strict=True)
        rows = [[place // 8, tensor.data_ptr(), count] for place, tensor, count in columns]
        self.tensors = tensors  # kept to keep their memory
        self.table = torch.tensor(rows, dtype=torch.int64).to(tensors[0].device)
        self.grid = len(tensors), triton.cdiv(max(words), AT_ONCE)

    @staticmethod
    def has(place: int, tensor: torch.Tensor) -> bool:
        """Whether this kernel can copy a tensor that begins at this byte of a bucket."""
        count = tensor.numel() * tensor.element_size()
        return tensor.is_contiguous() and place % 8 == tensor.data_ptr() % 8 == count % 8 == 0 < count

    def fill(self, memory: torch.Tensor) -> None:
        """Copy all to the bucket."""
        _copy[self.grid](memory.view(torch.int64), self.table, True, AT_ONCE, num_warps=8)

    def empty(self, memory: torch.Tensor) -> None:
        """Copy all from the bucket to their other places."""
        _copy[self.grid](memory.view(torch.int64), self.table, False, AT_ONCE, num_warps=8)


@triton.jit
def _copy(words, table, FILLS: tl.constexpr, AT_ONCE: tl.constexpr):
    own = table + tl.program_id(0) * 3
    inside = words + tl.load(own)
    outside = tl.load(own + 1).to(tl.pointer_type(tl.int64))
    count = tl.load(own + 2)
    first = tl.program_id(1).to(tl.int64) * AT_ONCE
    if first < count:
        at = first + tl.arange(0, AT_ONCE)
        if FILLS:
            tl.store(inside + at, tl.load(outside + at, mask=at < count), mask=at < count)
        else:
            tl.store(outside + at, tl.load(inside + at, mask=at < count), mask=at < count)


def row_sums(memory: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of the words of each row of a bucket, each word multiplied by the factor of its place in the row."""
    _row_sums[(len(out),)](memory.view(torch.int64), factors, out, len(factors), num_warps=4)


@triton.jit
def _row_sums(words, factors, out, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WORDS)
    tl.store(out + row, tl.sum(tl.load(words + row * WORDS + at) * tl.load(factors + at), 0))
