"""Write large content in small blocks.

The kernel caches written data in runs of pages as long as the write, up to some megabytes. Short runs usually reuse
recently freed pages. Long runs often need new pages. On a virtual machine the host must provide these first, which
takes longer than the rest of the write. On one virtual machine, writing 3.7 GB in blocks of 64 KiB took 0.8 to 1.2 s of
CPU time, in blocks of 256 KiB 0.8 to 4.4 s, in blocks of 1 MiB 0.7 to 9.1 s, and with `cp` 1.0 to 2.5 s (Linux 6.18,
ext4, 2026-11-25).
"""

import os
from collections.abc import Iterator

LONGEST = 2**16  # bytes of a write


def cut(content: memoryview, at: int) -> Iterator[memoryview]:
    """Cut bytes for this place of a file into writes. All but the last end at a multiple of LONGEST."""
    first = LONGEST - at % LONGEST
    for start in (0, *range(first, len(content), LONGEST)):
        stop = start + LONGEST if start else first
        yield content[start:stop]


def write_at(descriptor: int, content: memoryview, at: int) -> None:
    """Write all bytes at this place of a file."""
    for some in cut(content, at):
        left = some
        while left:
            count = os.pwrite(descriptor, left, at)
            left, at = left[count:], at + count
