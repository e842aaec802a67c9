"""Unpacking on a GPU in one pass over memory: codes and scales in, weights out, all matrices of a layer at once.

A program processes a tile of whole blocks of columns. The block's sides are constants of the compiled kernel, so one
load of a block's scale serves all of its values. The kernel is limited by instructions rather than memory, so decoding
is short. GPUs from compute capability 8.9 decode FP8 in hardware. Elsewhere FP8 bits are read as half precision, which
is 256 times smaller, and e2m1 bits too, which is 16,384 times smaller. Eight 4-bit codes are read at once.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from trainer.megatron.packed_base.codes import FP8, Codes, kind_of, shape_of

COLUMNS = 512  # of a tile, at most; its rows follow from NUMBERS
NUMBERS = 8192
WARPS = 8


def unpack(store: Codes) -> torch.Tensor:
    codes, scales, factors, (height, width) = store.codes, store.scales, store.factors, store.block
    count, rows, columns = shape_of(codes)
    whole = torch.empty((count, rows, columns), dtype=store.dtype, device=codes.device)
    wide = max(width, min(COLUMNS, triton.next_power_of_2(columns)))
    tall = NUMBERS // wide
    tall = min(tall, height) if height > 1 else tall  # rows within one block; any number if blocks have one row
    packed = codes.dtype != FP8
    assert columns % 8 == 0 or not packed, "eight codes are read at once"
    grid = (triton.cdiv(columns, wide), triton.cdiv(rows, tall), count)
    _unpack[grid](
        codes.view(torch.int32 if packed else torch.uint8),
        scales.view(torch.uint8) if scales.dtype == FP8 else scales,
        factors,
        whole,
        rows,
        columns,
        KIND=kind_of(codes, scales),
        FACTORS=None if factors is None else factors.shape[1],
        HEIGHT=height,
        WIDTH=width,
        TALL=tall,
        GROUPS=wide // width,
        NATIVE=codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (8, 9),
        num_warps=WARPS,
    )
    return whole


@triton.jit
def _unpack(
    codes,
    scales,
    factors,
    whole,
    rows,
    columns,
    KIND: tl.constexpr,
    FACTORS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    # The scales of each row's blocks in the tile; the columns of a block share one.
    across = tl.cdiv(columns, WIDTH)
    of_blocks = matrix * tl.cdiv(rows, HEIGHT) * across + (row // HEIGHT)[:, None] * across + group[None, :]
    known = (row < rows)[:, None] & (group < across)[None, :]
    scale = tl.load(scales + of_blocks, mask=known, other=0)
    if KIND == "nvfp4":
        scale = _e4m3(scale, NATIVE)
        each = rows // FACTORS
        scale = scale * tl.load(factors + matrix * FACTORS + row // each, mask=row < rows, other=0.0)[:, None]
    elif KIND == "mxfp4":
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = scale.to(tl.float32)
    line = (matrix * rows + row.to(tl.int64))[:, None] * columns
    start = tl.program_id(0) * GROUPS * WIDTH
    if KIND != "fp8":
        word = start // 8 + tl.arange(0, GROUPS * WIDTH // 8)
        inside = (row < rows)[:, None] & (word < columns // 8)[None, :]
        eight = tl.load(codes + line // 8 + word[None, :], mask=inside, other=0)
        # The order of joins puts columns 0 to 7 side by side.
        even = tl.join(
            tl.join(_number(eight, 0, KIND), _number(eight, 4, KIND)),
            tl.join(_number(eight, 2, KIND), _number(eight, 6, KIND)),
        )
        odd = tl.join(
            tl.join(_number(eight, 1, KIND), _number(eight, 5, KIND)),
            tl.join(_number(eight, 3, KIND), _number(eight, 7, KIND)),
        )
        number = tl.reshape(tl.join(even, odd), (TALL, GROUPS, WIDTH))
    else:
        column = start + tl.arange(0, GROUPS * WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        byte = tl.load(codes + line + column[None, :], mask=inside, other=0)
        number = tl.reshape(_e4m3(byte, NATIVE), (TALL, GROUPS, WIDTH))
    values = tl.reshape(number * scale[:, :, None], (TALL, GROUPS * WIDTH)).to(whole.dtype.element_ty)
    target = start + tl.arange(0, GROUPS * WIDTH)
    tl.store(whole + line + target[None, :], values, mask=(row < rows)[:, None] & (target < columns)[None, :])


@triton.jit
def _e4m3(byte, NATIVE: tl.constexpr):
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    half = ((byte.to(tl.uint16) & 0x80) << 8) | ((byte.to(tl.uint16) & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _number(eight, place: tl.constexpr, KIND: tl.constexpr):
    """Decode one of eight 4-bit codes. An integer becomes the low bits of 2 ** 23 in fp32, from which 2 ** 23 is
    subtracted.
    """
    bits = (eight >> (4 * place)) & 15
    if KIND == "int":
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 8.0)
    half = ((bits & 8) << 12) | ((bits & 7) << 9)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
