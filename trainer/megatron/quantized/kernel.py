"""Kernels of a norm, GELU, and GELU's backward that write FP8 and its transpose, and record the maximum.

A value is first rounded to the type of the input and then to FP8, as if it were written in between.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl

from trainer.megatron.quantized import Parts

# Rows and columns of a tile.
NORM_TALL, NORM_WIDE = tl.constexpr(64), tl.constexpr(128)
GELU_TALL, GELU_WIDE = tl.constexpr(32), tl.constexpr(128)
BACK_TALL, BACK_WIDE = tl.constexpr(128), tl.constexpr(64)
SUMMED = tl.constexpr(256)  # rows that one program sums
WARPS = 4  # per tile


def norm(x: torch.Tensor, weight, bias, means, spreads: torch.Tensor, centered: bool, parts: Parts):
    """Return the normed rows; for RMS norms `means` is None, and `bias` is not read."""
    programs = grid(*x.shape, NORM_TALL, NORM_WIDE)
    _norm[programs](x, weight, bias, means, spreads, *_places(parts), *x.shape, centered, num_warps=WARPS)
    return parts.whole


def gelu(bias: torch.Tensor, x: torch.Tensor, parts: Parts):
    """Return GELU of x + bias, by the tanh approximation."""
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    _gelu[grid(*sizes, GELU_TALL, GELU_WIDE)](x, bias, *_places(parts), *sizes, num_warps=WARPS)
    return parts.whole


def gelu_back(gradient: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, parts: Parts):
    """Return the gradients of x, in FP8, and of the bias."""
    sizes = x.numel() // x.shape[-1], x.shape[-1]
    programs = grid(*sizes, SUMMED, BACK_WIDE)
    some = torch.empty((programs[1], sizes[1]), dtype=torch.float32, device=x.device)
    _gelu_back[programs](gradient, x, bias, some, *_places(parts), *sizes, num_warps=WARPS)
    return parts.whole, some.sum(0).to(bias.dtype)


def grid(rows: int, columns: int, tall: tl.constexpr, wide: tl.constexpr) -> tuple[int, int]:
    """Return the numbers of programs across and down, for tiles of this size."""
    return triton.cdiv(columns, wide.value), triton.cdiv(rows, tall.value)


def _places(parts: Parts) -> tuple:
    return parts.rows, parts.turned, parts.scale, parts.inverse, parts.largest


@triton.jit
def _read(x, row, column, rows, columns):
    """Load a tile, in fp32."""
    known = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=known, other=0.0).to(tl.float32)


@triton.jit
def _keep(y, out, turned, scale, row, column, rows, columns):
    """Write a tile in FP8, also to its transpose unless that is None, and return its largest magnitude."""
    known = (row < rows)[:, None] & (column < columns)[None, :]
    quantized = (y * scale).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * columns + column[None, :], quantized, mask=known)
    if turned is not None:
        place = column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(turned + place, tl.trans(quantized), mask=(column < columns)[:, None] & (row < rows)[None, :])
    return tl.max(tl.max(tl.where(known, tl.abs(y), 0.0), 1), 0)


@triton.jit
def _end(maximum, scale, inverse, largest):
    tl.atomic_max(largest, maximum)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(inverse, tl.div_rn(tl.full((), 1.0, tl.float32), scale))  # as Transformer Engine rounds it


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh_gelu(y):
    """GELU, by the tanh approximation."""
    return y * sigmoid(2.0 * 0.79788456 * y * (1.0 + 0.044715 * y * y))


@triton.jit
def tanh_gelu_slope(y):
    """The slope of tanh_gelu."""
    half = sigmoid(2.0 * 0.79788456 * y * (1.0 + 0.044715 * y * y))  # (1 + tanh) / 2
    return half + 2.0 * y * half * (1.0 - half) * (0.79788456 + 0.1070322243 * y * y)


@triton.jit
def _norm(
    x, weight, bias, means, spreads, out, turned, scales, inverse, largest, rows, columns, CENTERED: tl.constexpr
):
    row = tl.program_id(1) * NORM_TALL + tl.arange(0, NORM_TALL)
    column = tl.program_id(0) * NORM_WIDE + tl.arange(0, NORM_WIDE)
    y = _read(x, row, column, rows, columns)
    if means is not None:
        y -= tl.load(means + row, mask=row < rows, other=0.0)[:, None]
    by = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    y *= tl.load(spreads + row, mask=row < rows, other=0.0)[:, None]
    y *= (by + 1.0 if CENTERED else by)[None, :]
    if means is not None:
        y += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scales)
    y = y.to(x.dtype.element_ty).to(tl.float32)
    _end(_keep(y, out, turned, scale, row, column, rows, columns), scale, inverse, largest)


@triton.jit
def _gelu(x, bias, out, turned, scales, inverse, largest, rows, columns):
    row = tl.program_id(1) * GELU_TALL + tl.arange(0, GELU_TALL)
    column = tl.program_id(0) * GELU_WIDE + tl.arange(0, GELU_WIDE)
    y = _read(x, row, column, rows, columns)
    y += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    y = tanh_gelu(y)
    scale = tl.load(scales)
    y = y.to(x.dtype.element_ty).to(tl.float32)
    _end(_keep(y, out, turned, scale, row, column, rows, columns), scale, inverse, largest)


@triton.jit
def _gelu_back(gradient, x, bias, some, out, turned, scales, inverse, largest, rows, columns):
    column = tl.program_id(0) * BACK_WIDE + tl.arange(0, BACK_WIDE)
    added = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    scale = tl.load(scales)
    total = tl.zeros((BACK_WIDE,), tl.float32)
    maximum = tl.max(total, 0)
    for first in range(0, SUMMED, BACK_TALL):
        row = tl.program_id(1) * SUMMED + first + tl.arange(0, BACK_TALL)
        known = (row < rows)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]  # computed once for both loads; registers suffice
        y = tl.load(x + place, mask=known, other=0.0).to(tl.float32) + added
        upstream = tl.load(gradient + place, mask=known, other=0.0).to(tl.float32)
        upstream *= tanh_gelu_slope(y)
        total += tl.sum(upstream, 0)
        y = upstream.to(x.dtype.element_ty).to(tl.float32)
        maximum = tl.maximum(maximum, _keep(y, out, turned, scale, row, column, rows, columns))
    tl.store(some + tl.program_id(1) * columns + column, total, mask=column < columns)
    _end(maximum, scale, inverse, largest)
