"""Checksums of a base's files, beside them: who reads a piece looks at its file once.

That takes a tenth of the time of the pieces' own checksums, which are their archives' CRC-32. Bases of before, and
checkpoints of a training, have none.
"""

import json
from pathlib import Path
from typing import BinaryIO

import xxhash

from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically

FILE = "sums.json"
BLOCK = 2**18  # bytes read at once, which a core keeps near


def of(file: BinaryIO) -> str:
    found, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK))
    file.seek(0)
    while count := file.readinto(block):  # pyright: ignore[reportAttributeAccessIssue]
        found.update(block[:count])
    return found.hexdigest()


def write(folder: Path, sums: dict[str, str]) -> None:
    write_atomically(folder / FILE, json.dumps(sums, indent=1, sort_keys=True), durable=True)


def read(folder: Path) -> dict[str, str]:
    """Checksums by the names of files; none where nobody has written any that can be read."""
    try:
        return json_object.read(folder / FILE)
    except Fault:
        return {}
