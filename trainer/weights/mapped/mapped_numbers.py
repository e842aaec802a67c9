"""Numbers that lie somewhere in a file, mapped into memory: they cost memory where they are touched."""

import mmap
from typing import BinaryIO

import torch


def read(file: BinaryIO, start: int, dtype: torch.dtype, count: int, soon: bool = False) -> torch.Tensor:
    """Map `count` numbers of a file, from this place on. Writing into them changes no file; `count` is above 0.

    `soon`: all of them are about to be read, in their order. Where they begin at no multiple of their size, as a header
    may ask for it and pieces of a checkpoint often do, they are read into memory: torch maps no such numbers.
    """
    if start % dtype.itemsize:
        return _copy(file, start, dtype, count)
    before = start % mmap.ALLOCATIONGRANULARITY  # where a mapping may begin
    size = before + count * dtype.itemsize
    content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start - before)
    if soon:
        content.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=before)


def _copy(file: BinaryIO, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    found = torch.empty(count * dtype.itemsize, dtype=torch.uint8)
    whole = memoryview(found.numpy())
    file.seek(start)
    done = 0
    while done < len(whole):
        some = file.readinto(whole[done:])  # pyright: ignore[reportAttributeAccessIssue]
        if not some:
            raise ValueError(f"ends {len(whole) - done} bytes early")
        done += some
    return found.view(dtype)
