"""Blank the GPU code that one kind of GPU does not run, so that a CUDA library compresses well.

    python slim_fatbin.py LIBRARY [--arch 90]

nvcc embeds "fat binaries": a header, then one entry per architecture with machine code (ELF) or PTX. Every entry but
the machine code for the one architecture is overwritten with zeros, in place: no offset in the library moves, so the
loader and the CUDA runtime still find everything, and zeros cost nothing in an archive. Of Transformer Engine 2.20's
263 MB of GPU code 18 stay, and its library of 343 MB packs to 22. NVIDIA does not document the layout; where an entry
does not look as expected, nothing is written.
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)  # magic, version, size of the header
HEADER = struct.Struct("<IHHQ")  # and at last the size of all entries
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, size of this header, size of the code, ..., architecture
PTX, ELF = 1, 2


class Entry(NamedTuple):
    kind: int
    arch: int  # 90 for sm_90 and for sm_90a
    start: int
    end: int


def entries(data: bytearray) -> Iterator[Entry]:
    """The code of every fat binary in a library."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        end = at + HEADER.size + HEADER.unpack_from(data, at)[-1]
        at += HEADER.size
        while at < end:
            kind, _, header, size, arch = ENTRY.unpack_from(data, at)
            if kind not in (PTX, ELF) or not ENTRY.size <= header <= 256:
                raise ValueError(f"no entry of a fat binary at byte {at}: kind {kind}, header of {header} bytes")
            yield Entry(kind, arch, at + header, at + header + size)
            at += header + size


def slim(path: Path, arch: int) -> None:
    """Keep one architecture's machine code in the library at `path`; raises ValueError where it has none."""
    data = bytearray(path.read_bytes())
    kept = blanked = 0
    for entry in entries(data):
        size = entry.end - entry.start
        if (entry.kind, entry.arch) == (ELF, arch):
            kept += size
        else:
            data[entry.start : entry.end] = bytes(size)
            blanked += size
    if not kept:
        raise ValueError(f"{path}: no machine code for sm_{arch}")
    path.write_bytes(data)
    print(f"{path.name}: {kept / 1e6:.0f} MB of GPU code kept, {blanked / 1e6:.0f} MB blanked")


def main() -> int:
    parser = argparse.ArgumentParser(description="Keep one architecture's GPU code in a CUDA library.")
    parser.add_argument("library", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="such as 90 for H100 and H200 (default)")
    options = parser.parse_args()
    try:
        slim(options.library, options.arch)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
