"""A thread that has the disk store what was written, beside what is written next.

Where the model and what is made of it do not fit into memory together, the kernel is asked to forget what is done with.
Else it looks for memory itself, at every page, and forgets the packages of the next command first.
"""

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

Span = tuple[Path, int, int]  # a file, the first byte, and how many


class Storing:
    """The thread, for what is `size` bytes in all, read and written."""

    def __init__(self, size: int):
        self.forgets = size > psutil.virtual_memory().available
        self.pool = ThreadPoolExecutor(1, "storing")
        self.before: list[Span] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.pool.shutdown(cancel_futures=kind is not None)

    def begin(self, written: Span, read: Iterable[Span]) -> None:
        """Have the disk begin with what was written, out of what was read. That all is stored is not waited for."""
        self.pool.submit(self._begin, written, [*read])

    def _begin(self, written: Span, read: list[Span]) -> None:
        _forget(written)  # which begins to store what is not stored yet, and waits where the disk is busy
        if self.forgets:
            for span in [*self.before, *read]:
                _forget(span)
            self.before = [written]


def _forget(span: Span) -> None:
    path, start, size = span
    if not size:  # to the kernel, 0 is all that follows
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
