"""Numbers that lie somewhere in a file, mapped into memory: they cost memory where they are touched."""

import mmap
from typing import BinaryIO

import torch


def read(file: BinaryIO, start: int, dtype: torch.dtype, count: int, soon: bool = False) -> torch.Tensor:
    """Map `count` numbers of a file, from this place on. Writing into them changes no file; `count` is above 0.

    `soon`: all of them are about to be read, in their order.
    """
    before = start % mmap.ALLOCATIONGRANULARITY  # where a mapping may begin
    size = before + count * dtype.itemsize
    content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start - before)
    if soon:
        content.madvise(mmap.MADV_WILLNEED)
    if start % dtype.itemsize:  # a header may ask for it; torch wants numbers where those of the type may begin
        content, before = bytearray(content[before:]), 0
    return torch.frombuffer(content, dtype=dtype, count=count, offset=before)
