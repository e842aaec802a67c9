"""Work on whole buckets on a GPU, each in one pass over memory and one launch for hundreds of tensors.

Where the tensors lie is in tables on the GPU: to name each in a launch of its own would take longer than to copy it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trainer.reinforcement.transfer.repeated.recipes import Merged

TALL, WIDE, WARPS = 64, 128, 8  # of a tile that is merged
LEAST, DEEPEST = 16, 32  # of a rank, that a product on a GPU takes at once
AT_ONCE = 4096  # words that a program copies
ALIGNED = 16  # bytes, that a matrix has to begin at a multiple of
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def kind(merged: Merged) -> tuple | None:
    """All that matrices which are merged together have in common; None of one that is not merged here."""
    parts = (merged.base, merged.a, merged.b)
    if any(part.dtype not in TYPES or part.data_ptr() % ALIGNED for part in parts):
        return None
    forms = [(*part.shape, part.stride(0), part.dtype) for part in parts]
    return merged.scale, *forms


def merged_table(each: Sequence[Merged], places: Sequence[int]) -> torch.Tensor:
    """A row for each matrix: how many numbers its parts lie behind those of the first, and its first byte in a bucket.

    From an address that is read from a table, numbers would be loaded one by one; from an argument's, eight at once.
    """
    rows = [
        [*map(_behind, (one.base, one.a, one.b), (each[0].base, each[0].a, each[0].b)), place]
        for one, place in zip(each, places, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(each[0].base.device)


def _behind(tensor: torch.Tensor, first: torch.Tensor) -> int:
    return (tensor.data_ptr() - first.data_ptr()) // first.element_size()


def merge(first: Merged, table: torch.Tensor, memory: torch.Tensor) -> None:
    """Merge matrices of the first one's kind into a bucket's memory: base + scale * b @ a.

    It is computed in fp32 and rounded once, to the type of the base.
    """
    base, a, b = first.base, first.a, first.b
    (rows, columns), rank = base.shape, a.shape[0]
    grid = (len(table), triton.cdiv(rows, TALL), triton.cdiv(columns, WIDE))
    deep = min(DEEPEST, max(LEAST, triton.next_power_of_2(rank)))
    strides = base.stride(0), a.stride(0), b.stride(0)
    together = [ALIGNED // part.element_size() for part in (base, a, b)]
    sizes = rows, columns, rank, first.scale, *strides, deep, TALL, WIDE, *together
    _merge[grid](table, base, a, b, memory, *sizes, num_warps=WARPS)


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


def copied_table(places: Sequence[int], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """A row for each tensor: its first word in a bucket, where it goes, and of how many words it is."""
    rows = [
        [place // 8, one.data_ptr(), one.numel() * one.element_size() // 8]
        for place, one in zip(places, targets, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(targets[0].device)


def is_of_words(place: int, target: torch.Tensor) -> bool:
    """Whether a tensor that is whole on both sides may be copied in words of 8 bytes."""
    count = target.numel() * target.element_size()
    return target.is_contiguous() and place % 8 == target.data_ptr() % 8 == count % 8 == 0


def copy(memory: torch.Tensor, table: torch.Tensor, longest: int) -> None:
    """Copy tensors of at most so many words from a bucket to where they go."""
    words = memory.view(torch.int64)
    _copy[(len(table), triton.cdiv(longest, AT_ONCE))](words, table, AT_ONCE, num_warps=8)


@triton.jit
def _copy(words, table, AT_ONCE: tl.constexpr):
    own = table + tl.program_id(0) * 3
    source = words + tl.load(own)
    target = tl.load(own + 1).to(tl.pointer_type(tl.int64))
    count = tl.load(own + 2)
    first = tl.program_id(1).to(tl.int64) * AT_ONCE
    if first < count:
        at = first + tl.arange(0, AT_ONCE)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def row_sums(memory: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Sums of the words of each row of a bucket, each word times a number that its place in the row gives."""
    _row_sums[(len(out),)](memory.view(torch.int64), factors, out, len(factors), num_warps=4)


@triton.jit
def _row_sums(words, factors, out, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WORDS)
    tl.store(out + row, tl.sum(tl.load(words + row * WORDS + at) * tl.load(factors + at), 0))
