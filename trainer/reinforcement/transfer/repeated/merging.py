"""Many weights with a low-rank adapter each, merged on a GPU in one pass over memory: base + scale * b @ a.

Matrices of one shape and rank go together. Where each of their parts lies is in a table on the GPU, so that a launch
takes hundreds of matrices, wherever Megatron has them. All is computed in fp32 and rounded once, to the base's type.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false

from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl

from trainer.reinforcement.transfer.repeated.recipes import Merged

TALL, WIDE = 64, 64  # of a tile
LEAST = 16  # of a rank, that a product on a GPU takes
WARPS = 4
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
COLUMNS = 7  # of the table


def kind(merged: Merged) -> tuple:
    """What matrices that go together have in common."""
    base, a, b = merged.base, merged.a, merged.b
    return base.shape, a.shape[0], merged.scale, base.dtype, a.dtype, b.dtype


def table(each: Sequence[Merged], places: Sequence[int]) -> torch.Tensor:
    """Where the parts of matrices of one kind lie, and at which byte of a bucket each begins when it is merged."""
    rows = [
        [*chain.from_iterable((part.data_ptr(), part.stride(0)) for part in (one.base, one.a, one.b)), place]
        for one, place in zip(each, places, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).to(each[0].base.device)


def merge(first: Merged, places: torch.Tensor, memory: torch.Tensor) -> None:
    """Merge matrices of the first one's kind into a bucket's memory, each to where the table says."""
    rows, columns = first.base.shape
    rank = first.a.shape[0]
    grid = (len(places), triton.cdiv(rows, TALL), triton.cdiv(columns, WIDE))
    _merge[grid](
        places,
        memory,
        rows,
        columns,
        rank,
        first.scale,
        FIELDS=COLUMNS,
        RANK=max(LEAST, triton.next_power_of_2(min(rank, 32))),
        TALL=TALL,
        WIDE=WIDE,
        BASE=TYPES[first.base.dtype],
        A=TYPES[first.a.dtype],
        B=TYPES[first.b.dtype],
        num_warps=WARPS,
    )


@triton.jit
def _merge(
    places,
    memory,
    rows,
    columns,
    rank,
    scale,
    FIELDS: tl.constexpr,
    RANK: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    BASE: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    place = places + tl.program_id(0) * FIELDS
    base = tl.load(place).to(tl.pointer_type(BASE))
    base_stride = tl.load(place + 1)
    a = tl.load(place + 2).to(tl.pointer_type(A))
    a_stride = tl.load(place + 3)
    b = tl.load(place + 4).to(tl.pointer_type(B))
    b_stride = tl.load(place + 5)
    out = (memory + tl.load(place + 6)).to(tl.pointer_type(BASE))
    row = (tl.program_id(1) * TALL + tl.arange(0, TALL)).to(tl.int64)[:, None]
    column = (tl.program_id(2) * WIDE + tl.arange(0, WIDE)).to(tl.int64)[None, :]
    change = tl.zeros((TALL, WIDE), tl.float32)
    for start in range(0, rank, RANK):
        depth = start + tl.arange(0, RANK)
        known = depth < rank
        left = tl.load(b + row * b_stride + depth[None, :], mask=(row < rows) & known[None, :], other=0.0)
        right = tl.load(a + depth[:, None] * a_stride + column, mask=known[:, None] & (column < columns), other=0.0)
        change += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    inside = (row < rows) & (column < columns)
    whole = tl.load(base + row * base_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (whole + change * scale).to(BASE), mask=inside)
