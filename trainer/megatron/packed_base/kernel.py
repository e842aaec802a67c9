"""Unpacking on a GPU in one pass over memory: codes and scales in, weights out, all matrices of a layer at once.

A program takes a tile of whole blocks of columns. The block's sides are constants of the compiled kernel, so the scale
of a block is one load that all of its numbers share, and no number costs a division. FP8 is decoded by its bits, which
any GPU does: as half precision they are the number over 256, exactly.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl

from trainer.megatron.packed_base.codes import FP8, MIDDLE, shape_of

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
    grid = (triton.cdiv(columns, wide), triton.cdiv(rows, tall), count)
    _unpack[grid](
        codes.view(torch.uint8),
        scales,
        whole,
        rows,
        columns,
        HEIGHT=height,
        WIDTH=width,
        TALL=tall,
        GROUPS=wide // width,
        PACKED=packed,
        MIDDLE=MIDDLE,
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
    MIDDLE: tl.constexpr,
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
        pair = start // 2 + tl.arange(0, GROUPS * WIDTH // 2)
        inside = (row < rows)[:, None] & (pair < columns // 2)[None, :]
        byte = tl.load(codes + line // 2 + pair[None, :], mask=inside, other=0)
        low, high = (byte & 15).to(tl.float32) - MIDDLE, (byte >> 4).to(tl.float32) - MIDDLE
        number = tl.reshape(tl.join(low, high), (TALL, GROUPS, WIDTH))
    else:
        column = start + tl.arange(0, GROUPS * WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        byte = tl.load(codes + line + column[None, :], mask=inside, other=0).to(tl.uint16)
        half = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True)
        number = tl.reshape(half.to(tl.float32) * 256.0, (TALL, GROUPS, WIDTH))
    found = tl.reshape(number * scale[:, :, None], (TALL, GROUPS * WIDTH)).to(OUT)
    to = start + tl.arange(0, GROUPS * WIDTH)
    tl.store(whole + line + to[None, :], found, mask=(row < rows)[:, None] & (to < columns)[None, :])
