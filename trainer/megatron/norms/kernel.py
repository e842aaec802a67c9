"""Layer norms and RMS norms in one pass over memory, forward and backward.

A program processes whole rows: forward one tile of them; backward many tiles, summing the gradients of the weight and
of the bias. Few partial sums remain, which torch adds. Everything is computed in fp32 and rounded once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import functools

import torch
import triton
import triton.language as tl

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
    out = torch.empty_like(x) if normed else x
    means, spreads = x.new_empty((2, rows), dtype=torch.float32)
    tall, wide, warps = _tile(columns, *FORWARD)
    tensors = x, weight, weight if bias is None else bias, out, means, spreads
    sizes = rows, columns, epsilon, bias is not None, centered, normed, tall, wide
    _forward[(triton.cdiv(rows, tall),)](*tensors, *sizes, num_warps=warps)
    return out, means, spreads


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
    tiles, has_mean = triton.cdiv(rows, tall), means is not None
    count = min(tiles, PROGRAMS * (_multiprocessors(x.device) if x.is_cuda else 1))
    out, some = torch.empty_like(x), x.new_empty((2, count if trained else 0, columns), dtype=torch.float32)
    added = past is not None
    bypass = past.contiguous() if added else x
    tensors = gradient.contiguous(), x, means if has_mean else spreads, spreads, weight, bypass, out, some
    read = tall * wide * (3 if added else 2) * x.element_size()
    ahead = AHEAD if AHEAD * read <= ROOM else 1
    sizes = rows, columns, tiles, count * columns, has_mean, centered, trained, added, tall, wide, ahead
    _backward[(count,)](*tensors, *sizes, num_warps=warps)
    of_weight, of_bias = some.sum(1).to(weight.dtype)
    return out, of_weight, of_bias


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile(columns: int, numbers: int, warps: int) -> tuple[int, int, int]:
    """Return rows and columns of a tile, and its number of warps, which grows with long rows."""
    wide = triton.next_power_of_2(columns)
    return max(1, numbers // wide), wide, min(16, warps * max(1, wide // numbers))


@triton.jit
def _weights(weight, column, known, CENTERED: tl.constexpr):
    scale = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    return scale + 1.0 if CENTERED else scale


@triton.jit
def _forward(
    x,
    weight,
    bias,
    out,
    means,
    spreads,
    rows,
    columns,
    epsilon,
    HAS_MEAN: tl.constexpr,
    CENTERED: tl.constexpr,
    NORMED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0) * TALL + tl.arange(0, TALL)
    column = tl.arange(0, WIDE)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    known = (row < rows)[:, None] & (column < columns)[None, :]
    y = tl.load(x + place, mask=known, other=0.0).to(tl.float32)
    if HAS_MEAN:
        mean = tl.sum(y, 1) / columns
        y = tl.where(known, y - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=row < rows)
    spread = 1.0 / tl.sqrt(tl.sum(y * y, 1) / columns + epsilon)
    tl.store(spreads + row, spread, mask=row < rows)
    if NORMED:
        y = y * spread[:, None] * _weights(weight, column, column < columns, CENTERED)[None, :]
        if HAS_MEAN:
            y += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        tl.store(out + place, y.to(out.dtype.element_ty), mask=known)


@triton.jit
def _backward(
    gradient,
    x,
    means,
    spreads,
    weight,
    bypass,
    out,
    some,
    rows,
    columns,
    tiles,
    bias_offset,
    HAS_MEAN: tl.constexpr,
    CENTERED: tl.constexpr,
    TRAINED: tl.constexpr,
    ADDED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    AHEAD: tl.constexpr,
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
        if HAS_MEAN:
            y = tl.where(known, y - tl.load(means + row, mask=row < rows, other=0.0)[:, None], 0.0)
        y *= spread[:, None]
        if TRAINED:
            of_weight += upstream * y
            of_bias += upstream
        upstream *= scale[None, :]
        of_x = upstream - y * (tl.sum(upstream * y, 1) / columns)[:, None]
        if HAS_MEAN:
            of_x -= (tl.sum(upstream, 1) / columns)[:, None]
        of_x *= spread[:, None]
        if ADDED:
            of_x += tl.load(bypass + place, mask=known, other=0.0).to(tl.float32)
        tl.store(out + place, of_x.to(out.dtype.element_ty), mask=known)
    if TRAINED:
        line = some + tl.program_id(0) * columns + column
        tl.store(line, tl.sum(of_weight, 0), mask=column < columns)
        tl.store(line + bias_offset, tl.sum(of_bias, 0), mask=column < columns)
