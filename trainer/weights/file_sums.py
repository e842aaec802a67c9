"""Checksums of the pieces of a base's files, beside them: who reads a piece looks at it once.

That takes a tenth of the time of the pieces' own checksums, which are their archives' CRC-32 and are not written any
more. Bases that were made in November 2026 have checksums of whole files; those of before, and checkpoints of a
training, have none.
"""

import json
import sys
from pathlib import Path
from typing import BinaryIO

import xxhash

from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically

FILE = "sums.json"
BLOCK = 2**18  # bytes read at once, which a core keeps near


def name(file: str, offset: int) -> str:
    """Name of the checksum of the piece that begins there."""
    return f"{file}:{offset}"


def of(file: BinaryIO, start: int = 0, length: int = sys.maxsize) -> str:
    """Checksum of a file, or of a part of it."""
    found, block, left = xxhash.xxh3_128(), memoryview(bytearray(min(BLOCK, length))), length
    file.seek(start)
    while left and (count := file.readinto(block[: min(left, BLOCK)])):  # pyright: ignore[reportAttributeAccessIssue]
        found.update(block[:count])
        left -= count
    return found.hexdigest()


def write(folder: Path, sums: dict[str, str]) -> None:
    write_atomically(folder / FILE, json.dumps(sums, indent=1, sort_keys=True), durable=True)


def read(folder: Path) -> dict[str, str]:
    """Checksums by their names; none where nobody has written any that can be read."""
    try:
        return json_object.read(folder / FILE)
    except Fault:
        return {}
