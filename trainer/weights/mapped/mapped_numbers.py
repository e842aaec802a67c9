"""Values in a file, mapped into memory: they use memory only when they are touched."""

import mmap
from typing import BinaryIO

import torch


def read(file: BinaryIO, start: int, dtype: torch.dtype, count: int, soon: bool = False) -> torch.Tensor:
    """Map `count` (above 0) values of a file, beginning at `start`. Writing to them does not change the file.

    `soon`: all of them will be read soon, in order. Values that are not aligned to their size (allowed by headers,
    frequent in checkpoints) are read into memory, because torch cannot map them.
    """
    if start % dtype.itemsize:
        return fill(file, start, torch.empty(count * dtype.itemsize, dtype=torch.uint8)).view(dtype)
    before = start % mmap.ALLOCATIONGRANULARITY  # a mapping begins at a multiple of this
    size = before + count * dtype.itemsize
    content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=start - before)
    if soon:
        content.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=before)


def fill(file: BinaryIO, start: int, content: torch.Tensor) -> torch.Tensor:
    """Fill a tensor of bytes from this place of a file. Return it. Raise a ValueError if the file ends early."""
    file.seek(start)
    filled = file.readinto(content.numpy().data)  # pyright: ignore[reportAttributeAccessIssue]
    if filled < len(content):
        raise ValueError(f"ends {len(content) - filled} bytes early")
    return content
