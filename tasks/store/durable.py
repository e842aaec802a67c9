"""Files that survive a crash: written, synced, then renamed. Errors of the disk become one line."""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from contract import files
from contract.amounts import size
from contract.faults import Fault
from tasks.store.folder import BLOCK


def tag_of(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        # The kernel's times have a resolution of 4 ms, and inodes are reused. Without an exact time, the third object
        # written within 4 ms could have the tag of the first.
        now = time.time_ns()
        os.utime(f.fileno(), ns=(now, now))
        os.fsync(f.fileno())


def into_place(partial: Path, target: Path) -> None:
    for attempt in range(20):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.replace(target)
            return
        except FileNotFoundError:  # another process removed the empty folder at this moment
            if attempt == 19 or not partial.exists():
                raise


def sync(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.sync(folder)


def copy(source, target) -> str:
    digest = hashlib.sha256()
    while block := source.read(BLOCK):
        target.write(block)
        digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def plainly(where: Path) -> Iterator[None]:
    """Turn errors of the operating system into Faults of one line."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename or where
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({size(shutil.disk_usage(where).free)} free)"
            raise Fault(f"{where}: the disk is full{free}; free some space, or use another folder") from None
        raise Fault(f"{path}: {error.strerror or error}; {where} must be a writable folder") from None
