"""SHA-256 checksums, in hexadecimal: of text, of JSON values, of files and of code.

Fast checksums of weights are in trainer/weights/file_sums.py, and those of tensors that are split over ranks in
trainer/weights/digests.py.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contract import regular_files
from contract.faults import named


def of(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def of_json(value: Any) -> str:
    """Checksum of a value that JSON can hold. The order of keys does not count."""
    return of(json.dumps(value, sort_keys=True))


def of_stream(file: Any) -> str:
    """Checksum of the rest of an open binary file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def of_file(path: Path) -> str:
    """Checksum of a regular file. Raise a Fault that names the file if it cannot be read."""
    with named(path, OSError), regular_files.open_regular(path) as file:
        return of_stream(file)


def of_code(root: Path, folders: Iterable[str]) -> str:
    """Short checksum of the Python files in these folders, committed or not."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]
