"""Libraries that torch is made of, read from the disk while Python imports what comes before torch.

After copies of a model that is larger than the host's memory, a start finds little of the packages there. The dynamic
linker then waits for each page that it touches, and the kernel reads 8 MB around it. Two things are known beforehand:
of every library the linker reads the tables of symbols and relocations and writes the segments with data, and
libtorch_cpu registers its operations from all over its code. A thread tells the kernel of them as soon as Python has
found the package of `python -m trainer.convert`, and the kernel reads beside the imports: they took 6.4 to 6.9 s so,
with most of it out of memory, 7.8 to 9.0 without, and 4.6 with all of it there (2026-11-24). What is in memory is not
read again, so processes that start together do not read twice.
"""

import contextlib
import importlib.util
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

COMMANDS = ("trainer.convert", "trainer.export", "trainer.compare")  # which load torch at once, on the CPU
WHOLE = "libtorch_cpu.so"
UNUSED = ("cudnn", ".alt.", "nvperf")  # loaded when they are needed
MAGIC = b"\x7fELF\x02\x01"  # of 64 bits, little-endian
LOAD, DYNAMIC, WRITABLE = 1, 2, 2
RELOCATIONS, ENTRY = (7, 8), 24  # where they are, and how long; bytes of one
TABLES = (RELOCATIONS, (5, 10), (23, 2))  # strings, and relocations of functions
PAGE = 4096
NUMBERS = struct.Struct("<QQ")

Span = tuple[int, int]  # first byte in the file, and number of bytes


def begin() -> None:
    """Begin to read, in a thread, where this process is one of COMMANDS that starts. Called when trainer is imported.

    While Python looks for the module that it is to run, "-m" stands in the place of its path.
    """
    if sys.argv[:1] == ["-m"] and any(name in sys.orig_argv for name in COMMANDS):
        threading.Thread(target=read, args=(libraries(),), name="ahead", daemon=True).start()


def libraries() -> list[Path]:
    """Torch's libraries, and those of CUDA and Triton's that are loaded too, whether there is a GPU or not."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return []
    torch = Path(found.origin).parent
    there = [*(torch / "lib").glob("lib*.so")]
    for others in ("nvidia/*/lib/lib*.so*", "triton/_C/lib*.so"):
        there += torch.parent.glob(others)
    return sorted(path for path in there if not any(part in path.name for part in UNUSED))


def read(paths: list[Path]) -> None:
    """Have the kernel read what the linker needs of these. What cannot be read is somebody else's to tell of."""
    for path in paths:
        with contextlib.suppress(OSError, OverflowError, struct.error), path.open("rb", buffering=0) as file:
            for first, count in [(0, 0)] if path.name == WHOLE else list(spans(file)):  # 0: up to the end
                os.posix_fadvise(file.fileno(), first, count, os.POSIX_FADV_WILLNEED)


def spans(file: BinaryIO) -> Iterator[Span]:
    """Spans of a library that the dynamic linker touches; none of a file that is no library."""
    head = file.read(64)
    if not head.startswith(MAGIC):
        return
    (start,), (size, number) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
    table = _bytes(file, start, size * number)
    rows = [struct.unpack_from("<IIQQQQ", table, size * row) for row in range(number)]
    loaded = [(flags, first, address, count) for kind, flags, first, address, _, count in rows if kind == LOAD]
    facts: dict[int, int] = {}
    for kind, _, first, _, _, count in rows:
        if kind == DYNAMIC:
            facts |= dict(NUMBERS.iter_unpack(_bytes(file, first, count - count % NUMBERS.size)))
    written = PAGE * facts.get(RELOCATIONS[1], 0) // ENTRY  # at most: libcufft has its kernels among its data
    yield from ((first, count) for flags, first, _, count in loaded if flags & WRITABLE and 0 < count <= written)
    for where, long in TABLES:
        for _, first, address, count in loaded:
            if facts.get(long) and address <= facts.get(where, -1) < address + count:
                yield first + facts[where] - address, facts[long]


def _bytes(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(min(count, 2**16))
