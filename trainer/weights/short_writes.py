"""Large content of files, written a little at a time.

The kernel keeps what is written in runs of pages that are as long as the write, up to some megabytes. Short runs are
pages that somebody gave back a moment ago. Long ones often are not, and on a virtual machine its host has to find them
first, which takes longer than all else of a write. With 64 KiB at a time 3.7 GB took 0.8 to 1.2 s of CPU time on one,
with 256 KiB 0.8 to 4.4, with 1 MiB 0.7 to 9.1, and `cp` 1.0 to 2.5 (Linux 6.18, ext4, 2026-11-25).
"""

import os
from collections.abc import Iterator

LONGEST = 2**16  # bytes of a write


def cut(content: memoryview, at: int) -> Iterator[memoryview]:
    """Cut bytes, which belong at this place of a file, into writes. All but the last end at a multiple of LONGEST."""
    first = LONGEST - at % LONGEST
    for start in (0, *range(first, len(content), LONGEST)):
        stop = start + LONGEST if start else first
        yield content[start:stop]


def write_at(descriptor: int, content: memoryview, at: int) -> None:
    """Write all of it at this place of a file."""
    for some in cut(content, at):
        left = some
        while left:
            count = os.pwrite(descriptor, left, at)
            left, at = left[count:], at + count
