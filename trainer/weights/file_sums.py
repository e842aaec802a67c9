"""Checksums of the pieces of a base's files, in a file next to them. A reader verifies each piece once.

Verifying takes a tenth of the time of the CRC-32 in torch's archives, which new bases no longer have. Some bases of
November 2026 have checksums of whole files instead, and so have the checkpoints of a training, which a resume verifies.
Older bases and checkpoints have none.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conf.model_files.weights import Entry
from contract import checkpoints, json_object, output_marks
from contract.faults import Fault
from contract.files import write_atomically
from trainer.startup import device
from trainer.weights import released

FILE = "sums.json"
NOT_SUMMED = (FILE, checkpoints.MARK, output_marks.MARKER)


def name(file: str, offset: int) -> str:
    """Return the key of the checksum for the piece that begins at this offset of the file."""
    return f"{file}:{offset}"


def of(path: Path, start: int = 0, length: int | None = None) -> str:
    """Return the checksum of a file, or of a part of it. Raise a Fault if the file ends within the part."""
    size = path.stat().st_size if length is None else length
    return released.checksum(path, Entry("U8", (size,), path.name, start, size))


def write(folder: Path, sums: dict[str, str]) -> None:
    write_atomically(folder / FILE, json.dumps(sums, indent=1, sort_keys=True), durable=True)


def write_all(folder: Path, sums: dict[str, str]) -> None:
    """Write the checksums of all files of a checkpoint. `sums` has some of them, by the paths of the files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_SUMMED)
    write(folder, {str(path.relative_to(folder)): sums.get(str(path)) or of(path) for path in files})


def changed(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Return the names of the files that have changed since write_all(), in one of several parts of all files."""
    sums = sorted(read(folder).items())[part::parts]
    with ThreadPoolExecutor(device.cores()) as pool:
        whole = pool.map(lambda item: _is_whole(folder / item[0], item[1]), sums)
        return [name for (name, _), is_whole in zip(sums, whole, strict=True) if not is_whole]


def _is_whole(path: Path, recorded: str) -> bool:
    """Whether the file has this checksum. An error of the file system is a Fault: the file may be whole."""
    try:
        return of(path) == recorded
    except (FileNotFoundError, Fault):  # the file is missing or shorter
        return False
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}: the checkpoint cannot be verified") from error


def read(folder: Path) -> dict[str, str]:
    """Return the checksums by their keys; empty if the file is missing or cannot be read."""
    try:
        return json_object.read(folder / FILE)
    except Fault:
        return {}
