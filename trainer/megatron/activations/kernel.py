"""GELU and SwiGLU fused with adjacent operations, each in one pass over memory, forward and backward.

They compute in fp32 and round once. tanh and the sigmoid use one exponential: with the library's tanh, GELU would be
limited by instructions. Gradients that are sums (of a bias over rows, of a token's weight over columns) are accumulated
in the same pass; torch adds the few partial sums of a bias.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from trainer.megatron.quantized.kernel import grid, sigmoid, tanh_gelu, tanh_gelu_slope

WIDE = tl.constexpr(256)  # columns of a tile
TALL = tl.constexpr(16)  # rows of a tile
SUMMED = tl.constexpr(256)  # rows that one program sums


def bias_gelu(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return GELU of x + bias, by the tanh approximation."""
    x, rows, columns = _lines(x)
    out = torch.empty_like(x)
    _bias_gelu[grid(rows, columns, TALL, WIDE)](x, bias, out, rows, columns)
    return out


def bias_gelu_back(gradient: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and of the bias."""
    x, rows, columns = _lines(x)
    out = torch.empty_like(x)
    programs = grid(rows, columns, SUMMED, WIDE)
    some = torch.empty((programs[1], columns), dtype=torch.float32, device=x.device)
    _bias_gelu_back[programs](gradient.contiguous(), x, bias, out, some, rows, columns)
    return out, some.sum(0).to(bias.dtype)


def bias_add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    x, rows, columns = _lines(x)
    out = torch.empty_like(x)
    _bias_add[grid(rows, columns, TALL, WIDE)](x, bias, residual.contiguous(), out, rows, columns)
    return out


def column_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all rows, in fp32: a bias's gradient, in a third of the time that torch needs."""
    x, rows, columns = _lines(x)
    programs = grid(rows, columns, SUMMED, WIDE)
    some = torch.empty((programs[1], columns), dtype=torch.float32, device=x.device)
    _column_sums[programs](x, some, rows, columns)
    return some.sum(0)


def swiglu(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return SiLU of the first half of each row times the second half, times the row's weight if `weights` is given."""
    x, rows, columns = _lines(x)
    out = x.new_empty((*x.shape[:-1], columns // 2))
    weights = None if weights is None else weights.contiguous()
    _swiglu[(rows,)](x, weights, out, columns // 2, _line(columns // 2))
    return out


def swiglu_back(
    gradient: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x and of the weights."""
    x, rows, columns = _lines(x)
    out = torch.empty_like(x)
    weights = None if weights is None else weights.contiguous()
    of_weights = None if weights is None else torch.empty_like(weights)
    width = columns // 2
    _swiglu_back[(rows,)](gradient.contiguous(), x, weights, of_weights, out, width, _line(width))
    return out, of_weights


def _lines(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return x with contiguous rows, and its numbers of rows and columns."""
    return x.contiguous(), x.numel() // x.shape[-1], x.shape[-1]


def _line(width: int) -> int:
    """Return how many columns of a row are processed together."""
    return 512 if width % 1024 else 1024


@triton.jit
def _tile(rows, columns, first):
    """Return the offsets of a tile's values, and a mask of those inside the tensor."""
    row = first + tl.arange(0, TALL)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    return row.to(tl.int64)[:, None] * columns + column[None, :], (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _of_columns(bias, columns):
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    return tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _bias_gelu(x, bias, out, rows, columns):
    place, known = _tile(rows, columns, tl.program_id(1) * TALL)
    y = tl.load(x + place, mask=known, other=0.0).to(tl.float32) + _of_columns(bias, columns)
    y = tanh_gelu(y)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=known)


@triton.jit
def _bias_gelu_back(gradient, x, bias, out, some, rows, columns):
    added = _of_columns(bias, columns)
    total = tl.zeros((TALL, WIDE), tl.float32)
    for first in range(0, SUMMED, TALL):
        place, known = _tile(rows, columns, tl.program_id(1) * SUMMED + first)
        y = tl.load(x + place, mask=known, other=0.0).to(tl.float32) + added
        upstream = tl.load(gradient + place, mask=known, other=0.0).to(tl.float32)
        of_x = upstream * tanh_gelu_slope(y)
        total += of_x
        tl.store(out + place, of_x.to(out.dtype.element_ty), mask=known)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    tl.store(some + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _bias_add(x, bias, residual, out, rows, columns):
    place, known = _tile(rows, columns, tl.program_id(1) * TALL)
    y = tl.load(x + place, mask=known, other=0.0).to(tl.float32) + _of_columns(bias, columns)
    y += tl.load(residual + place, mask=known, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=known)


@triton.jit
def _column_sums(x, some, rows, columns):
    total = tl.zeros((TALL, WIDE), tl.float32)
    for first in range(0, SUMMED, TALL):
        place, known = _tile(rows, columns, tl.program_id(1) * SUMMED + first)
        total += tl.load(x + place, mask=known, other=0.0).to(tl.float32)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    tl.store(some + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def _swiglu(x, weights, out, width, LINE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32) if weights is not None else 1.0
    for first in range(0, width, LINE):
        column = first + tl.arange(0, LINE)
        known = column < width
        gate = tl.load(x + row * 2 * width + column, mask=known, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=known, other=0.0).to(tl.float32)
        product = gate * sigmoid(gate) * up * weight
        tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=known)


@triton.jit
def _swiglu_back(gradient, x, weights, of_weights, out, width, LINE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32) if weights is not None else 1.0
    total = tl.zeros((LINE,), tl.float32)
    for first in range(0, width, LINE):
        column = first + tl.arange(0, LINE)
        known = column < width
        gate = tl.load(x + row * 2 * width + column, mask=known, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + column, mask=known, other=0.0).to(tl.float32)
        upstream = tl.load(gradient + row * width + column, mask=known, other=0.0).to(tl.float32)
        half = sigmoid(gate)
        total += upstream * gate * half * up
        upstream *= weight
        of_gate = upstream * up * half * (1.0 + gate * (1.0 - half))
        tl.store(out + row * 2 * width + column, of_gate.to(out.dtype.element_ty), mask=known)
        of_up = (upstream * gate * half).to(out.dtype.element_ty)
        tl.store(out + row * 2 * width + width + column, of_up, mask=known)
    if weights is not None:
        tl.store(of_weights + row, tl.sum(total, 0).to(of_weights.dtype.element_ty))
