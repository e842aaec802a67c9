"""Read torch's libraries from the disk while Python still imports other modules.

If the host has copied a model that is larger than its memory, the packages are no longer in the page cache. The dynamic
linker then waits for each page that it touches, and the kernel reads 8 MB around it. The needed parts are known in
advance: the linker reads the symbol and relocation tables and writes the data segments of every library, and
libtorch_cpu registers operations from all parts of its code. As soon as Python imports the package trainer for
`python -m trainer.convert`, a thread asks the kernel to read these parts during the other imports. If most packages
were not in memory, imports took 6.4 to 6.9 s with the thread and 7.8 to 9.0 s without it. With all packages in memory
they took 4.6 s (2026-11-24). The kernel does not read cached pages again, so processes that start together read once.
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

COMMANDS = ("trainer.convert", "trainer.export", "trainer.compare")  # these load torch at once, on the CPU
WHOLE = "libtorch_cpu.so"
UNUSED = ("cudnn", ".alt.", "nvperf")  # not loaded at the start
MAGIC = b"\x7fELF\x02\x01"  # of 64 bits, little-endian
LOAD, DYNAMIC, WRITABLE = 1, 2, 2
RELOCATIONS, ENTRY = (7, 8), 24  # tags of the table's address and size; bytes of an entry
TABLES = (RELOCATIONS, (5, 10), (23, 2))  # also of the strings, and of the relocations of functions
PAGE = 4096
NUMBERS = struct.Struct("<QQ")

Span = tuple[int, int]  # first byte in the file, and number of bytes


def begin() -> None:
    """Start reading in a thread, if this process is one of COMMANDS. Called when trainer is imported.

    While Python searches for the module to run, sys.argv[0] is "-m".
    """
    if sys.argv[:1] == ["-m"] and any(name in sys.orig_argv for name in COMMANDS):
        threading.Thread(target=read, args=(libraries(),), name="ahead", daemon=True).start()


def libraries() -> list[Path]:
    """Libraries of torch, and those of CUDA and Triton that it loads, with or without a GPU."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return []
    torch = Path(spec.origin).parent
    paths = [*(torch / "lib").glob("lib*.so")]
    for pattern in ("nvidia/*/lib/lib*.so*", "triton/_C/lib*.so"):
        paths += torch.parent.glob(pattern)
    return sorted(path for path in paths if not any(part in path.name for part in UNUSED))


def read(paths: list[Path]) -> None:
    """Ask the kernel to read the parts of these files that the linker needs. The import reports unreadable files."""
    for path in paths:
        with contextlib.suppress(OSError, OverflowError, struct.error), path.open("rb", buffering=0) as file:
            for first, count in [(0, 0)] if path.name == WHOLE else list(spans(file)):  # 0: up to the end
                os.posix_fadvise(file.fileno(), first, count, os.POSIX_FADV_WILLNEED)


def spans(file: BinaryIO) -> Iterator[Span]:
    """Spans of a library that the dynamic linker touches; none if the file is not an ELF library."""
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
    written = PAGE * facts.get(RELOCATIONS[1], 0) // ENTRY  # upper limit: libcufft has its kernels in its data segment
    yield from ((first, count) for flags, first, _, count in loaded if flags & WRITABLE and 0 < count <= written)
    for start_tag, size_tag in TABLES:
        for _, first, address, count in loaded:
            if facts.get(size_tag) and address <= facts.get(start_tag, -1) < address + count:
                yield first + facts[start_tag] - address, facts[size_tag]


def _bytes(file: BinaryIO, start: int, count: int) -> bytes:
    file.seek(start)
    return file.read(min(count, 2**16))
