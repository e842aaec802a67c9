"""Layer norms and RMS norms in one pass over memory, forward and backward.

A program processes whole rows: forward one tile of them; backward many tiles, summing the gradients of the weight and
of the bias. Few partial sums remain, which torch adds. Everything is computed in fp32 and rounded once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import functools

import torch
import triton
import triton.language as tl
from triton.language import constexpr

FORWARD, BACKWARD = (2048, 2), (4096, 8)  # values of a tile, at least, and warps for that many values
PROGRAMS, AHEAD = 2, 3  # backward: programs per multiprocessor, and tiles that each reads ahead,
ROOM = 96 * 1024  # if these need at most so many bytes of the multiprocessor's shared memory


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    centered: bool,
    normed: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the normed rows, their means, and their inverse standard deviations; without bias, inverse root mean
    squares.

    Without `normed`, x is returned instead of the rows.
    """
    rows, columns = x.shape
    out = torch.empty_like(x) if normed else None
    means, spreads = x.new_empty((2, rows), dtype=torch.float32)
    tall, wide, warps = _tile(columns, *FORWARD)
    tensors = x, weight, bias, out, means, spreads
    _forward[(triton.cdiv(rows, tall),)](*tensors, rows, columns, epsilon, centered, tall, wide, num_warps=warps)
    return x if out is None else out, means, spreads


def backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    means: torch.Tensor | None,
    spreads: torch.Tensor,
    weight: torch.Tensor,
    centered: bool,
    trained: bool = True,
    past: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, of the weight and of the bias; the last two are zeros unless `trained`.

    `past` is a gradient of x that bypassed the norm (the residual's); it is added to x's gradient.
    """
    rows, columns = x.shape
    tall, wide, warps = _tile(columns, *BACKWARD)
    tiles = triton.cdiv(rows, tall)
    count = min(tiles, PROGRAMS * (_multiprocessors(x.device) if x.is_cuda else 1))
    out, some = torch.empty_like(x), None
    if trained:
        some = x.new_empty((2, count, columns), dtype=torch.float32)
    past = None if past is None else past.contiguous()
    tensors = gradient.contiguous(), x, means, spreads, weight, past, out, some
    read = tall * wide * (2 if past is None else 3) * x.element_size()
    ahead = AHEAD if AHEAD * read <= ROOM else 1
    _backward[(count,)](*tensors, rows, columns, tiles, centered, tall, wide, ahead, num_warps=warps)
    of_weight, of_bias = weight.new_zeros((2, columns)) if some is None else some.sum(1).to(weight.dtype)
    return out, of_weight, of_bias


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile(columns: int, numbers: int, warps: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its number of warps, which grows with long rows."""
    wide = triton.next_power_of_2(columns)
    return max(1, numbers // wide), wide, min(16, warps * max(1, wide // numbers))


@triton.jit
def _weights(weight, column, known, CENTERED: constexpr):
    scale = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    return scale + 1.0 if CENTERED else scale


@triton.jit
def _forward(
    x, weight, bias, out, means, spreads, rows, columns, epsilon, CENTERED: constexpr, TALL: constexpr, WIDE: constexpr
):
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.arange(0, WIDE)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    known = (row < rows)[:, None] & (column < columns)[None, :]
    y = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
    if bias is not None:
        mean = tl.sum(y, 1) / columns
        y = tl.where(known, y - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=row < rows)
    spread = 1.0 / tl.sqrt(tl.sum(y * y, 1) / columns + epsilon)
    tl.store(spreads + row, spread, mask=row < rows)
    if out is not None:
        y = y * spread[:, None] * _weights(weight, column, column < columns, CENTERED)[None, :]
        if bias is not None:
            y += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, y.to(out.dtype.element_ty), mask=known)


@triton.jit
def _backward(
    gradient,
    x,
    means,
    spreads,
    weight,
    past,
    out,
    some,
    rows,
    columns,
    tiles,
    CENTERED: constexpr,
    TALL: constexpr,
    WIDE: constexpr,
    AHEAD: constexpr,
):
    column = tl.arange(0, WIDE)
    scale = _weights(weight, column, column < columns, CENTERED)
    of_weight = tl.zeros((TALL, WIDE), tl.float32)
    of_bias = tl.zeros((TALL, WIDE), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=AHEAD):
        row = tile * TALL + tl.arange(0, TALL)
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        known = (row < rows)[:, None] & (column < columns)[None, :]
        upstream = tl.load(gradient + place, mask=known, other=0.0).to(tl.float32)
        y = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
        spread = tl.load(spreads + row, mask=row < rows, other=0.0)
        if means is not None:
            y = tl.where(known, y - tl.load(means + row, mask=row < rows, other=0.0)[:, None], 0.0)
        y *= spread[:, None]
        if some is not None:
            of_weight += upstream * y
            of_bias += upstream
        upstream *= scale[None, :]
        of_x = upstream - y * (tl.sum(upstream * y, 1) / columns)[:, None]
        if means is not None:
            of_x -= (tl.sum(upstream, 1) / columns)[:, None]
        of_x *= spread[:, None]
        if past is not None:
            of_x += tl.load(past + place, mask=known, other=0.0).to(tl.float32)
        tl.store(out + place, of_x.to(out.dtype.element_ty), mask=known)
    if some is not None:
        line = some + tl.program_id(0) * columns + column
        tl.store(line, tl.sum(of_weight, 0), mask=column < columns)
        tl.store(line + tl.num_programs(0) * columns, tl.sum(of_bias, 0), mask=column < columns)
