"""A thread that flushes written data to the disk while the next data are written.

If the model and the output do not fit into memory together, the kernel is also asked to drop finished pages. Otherwise
it searches for free memory at every page, and first drops the packages that the next command needs.
"""

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

Span = tuple[Path, int, int]  # file, first byte, number of bytes


class Storing(ThreadPoolExecutor):
    """The thread, for `size` bytes in total, read and written."""

    def __init__(self, size: int):
        super().__init__(1, "storing")
        self.forgets = size > psutil.virtual_memory().available
        self.before: list[Span] = []

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def begin(self, written: Span, read: Iterable[Span]) -> None:
        """Start flushing the written bytes, made from the bytes in `read`, without waiting for it."""
        self.submit(self._begin, written, [*read])

    def _begin(self, written: Span, read: list[Span]) -> None:
        _forget(written)  # starts to flush dirty pages, and waits if the disk is busy
        if self.forgets:
            for span in [*self.before, *read]:
                _forget(span)
            self.before = [written]


def _forget(span: Span) -> None:
    path, start, size = span
    if not size:  # for the kernel, 0 means up to the end
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
