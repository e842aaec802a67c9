"""Cache of SHA-256 digests of files: a source of 5 GB is not read again at every start of a run.

A digest is valid while the file keeps its size, inode and times. They include the time of the inode's last change
(ctime), which every write changes and no program can set. Times have a limited resolution, so the digest of a file that
changed less than SETTLED before it was read is not cached.

Not covered: clocks that are set back, and writes to the disk that bypass the file system.
"""

# pyright: reportArgumentType=false

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from contract import checksums
from contract.faults import Fault
from contract.files import write_atomically

SETTLED = 2.0  # seconds; FAT has that grain, ext4 4 ms
LARGE = 1 << 20  # bytes; reading a smaller file is faster than looking up its digest

Stamp = list[int]


def digests(files: Sequence[Path], memory: Path) -> list[str]:
    """Digest of each file. `memory` is a file that may be lost at any time."""
    known = _read(memory)
    result, fresh = [], {}
    for file in files:
        path = str(file.resolve())
        try:
            stamp = _stamp(file)
            if known.get(path, {}).get("stamp") == stamp:
                result.append(known[path]["sha256"])
                continue
            digest = checksums.of_file(file)
            if _stamp(file) != stamp:
                raise Fault(f"{file}: is being written to; start again when it is finished")
        except OSError as error:
            raise Fault(f"{file}: {error.strerror}") from None
        result.append(digest)
        if stamp[0] >= LARGE and time.time() - max(stamp[2:]) / 1e9 > SETTLED:
            fresh[path] = {"stamp": stamp, "sha256": digest}
    if fresh:
        _write(memory, {path: entry for path, entry in known.items() if os.path.exists(path)} | fresh)
    return result


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read(memory: Path) -> dict[str, dict]:
    try:
        known = json.loads(memory.read_text("utf-8"))
        return known if all({"stamp", "sha256"} <= {*entry} for entry in known.values()) else {}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(memory: Path, known: dict[str, dict]) -> None:
    with contextlib.suppress(OSError):  # such as a full disk: the next run reads the files again
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(memory, json.dumps(known, indent=1), durable=False)
