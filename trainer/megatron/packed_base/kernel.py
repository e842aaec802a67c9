"""Unpacking on a GPU in one pass over memory: codes and scales in, weights out, all matrices of a layer at once.

A program takes a tile of whole blocks of columns. The block's sides are constants of the compiled kernel, so the scale
of a block is one load that all of its numbers share. What bounds it is instructions rather than memory, so a number
takes few: GPUs from compute capability 8.9 on decode FP8 themselves, elsewhere its bits are those of a number in half
precision that is 256 times smaller; and integers of 4 bits are read eight at a time.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from trainer.megatron.packed_base.codes import FP8, shape_of

COLUMNS = 512  # of a tile, at most; rows make it NUMBERS
NUMBERS = 8192
WARPS = 8
OUT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def unpack(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    count, rows, columns = shape_of(codes)
    whole = torch.empty((count, rows, columns), dtype=dtype, device=codes.device)
    height, width = block
    wide = max(width, min(COLUMNS, triton.next_power_of_2(columns)))
    tall = NUMBERS // wide
    tall = min(tall, height) if height > 1 else tall  # rows of one block, or of as many as there are
    packed = codes.dtype != FP8
    assert columns % 8 == 0 or not packed, "eight integers are read at once"
    grid = (triton.cdiv(columns, wide), triton.cdiv(rows, tall), count)
    _unpack[grid](
        codes.view(torch.int32 if packed else torch.uint8),
        scales,
        whole,
        rows,
        columns,
        HEIGHT=height,
        WIDTH=width,
        TALL=tall,
        GROUPS=wide // width,
        PACKED=packed,
        NATIVE=codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (8, 9),
        OUT=OUT[dtype],
        num_warps=WARPS,
    )
    return whole


@triton.jit
def _unpack(
    codes,
    scales,
    whole,
    rows,
    columns,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TALL: tl.constexpr,
    GROUPS: tl.constexpr,
    PACKED: tl.constexpr,
    NATIVE: tl.constexpr,
    OUT: tl.constexpr,
):
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TALL + tl.arange(0, TALL)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    # The scale of each row's blocks in the tile: one number a block, which its columns share.
    across = tl.cdiv(columns, WIDTH)
    of_blocks = matrix * tl.cdiv(rows, HEIGHT) * across + (row // HEIGHT)[:, None] * across + group[None, :]
    known = (row < rows)[:, None] & (group < across)[None, :]
    scale = tl.load(scales + of_blocks, mask=known, other=0.0).to(tl.float32)
    line = (matrix * rows + row.to(tl.int64))[:, None] * columns
    start = tl.program_id(0) * GROUPS * WIDTH
    if PACKED:
        word = start // 8 + tl.arange(0, GROUPS * WIDTH // 8)
        inside = (row < rows)[:, None] & (word < columns // 8)[None, :]
        eight = tl.load(codes + line // 8 + word[None, :], mask=inside, other=0)
        # Columns 0 and 1, 2 and 3 and so on stand side by side once those of each join do.
        even = tl.join(tl.join(_integer(eight, 0), _integer(eight, 4)), tl.join(_integer(eight, 2), _integer(eight, 6)))
        odd = tl.join(tl.join(_integer(eight, 1), _integer(eight, 5)), tl.join(_integer(eight, 3), _integer(eight, 7)))
        number = tl.reshape(tl.join(even, odd), (TALL, GROUPS, WIDTH))
    else:
        column = start + tl.arange(0, GROUPS * WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        byte = tl.load(codes + line + column[None, :], mask=inside, other=0)
        if NATIVE:
            number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            half = ((byte.to(tl.uint16) & 0x80) << 8) | ((byte.to(tl.uint16) & 0x7F) << 7)
            number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        number = tl.reshape(number, (TALL, GROUPS, WIDTH))
    found = tl.reshape(number * scale[:, :, None], (TALL, GROUPS * WIDTH)).to(OUT)
    to = start + tl.arange(0, GROUPS * WIDTH)
    tl.store(whole + line + to[None, :], found, mask=(row < rows)[:, None] & (to < columns)[None, :])


@triton.jit
def _integer(eight, place: tl.constexpr):
    """One of eight integers of 4 bits: as the last bits of 2 ** 23 in fp32, which is taken off again."""
    bits = ((eight >> (4 * place)) & 15) | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + 8.0)
