"""Files that survive a crash: written, synced, then renamed. A disk's refusal becomes one line."""

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


def tag_of(facts: os.stat_result) -> str:
    return f"{facts.st_ino}-{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        # The kernel's own times move on only every 4 ms, and inodes are used again: without this, an object written
        # three times in that span could have the first one's tag again.
        now = time.time_ns()
        os.utime(f.fileno(), ns=(now, now))
        os.fsync(f.fileno())


def into_place(partial: Path, target: Path) -> None:
    for attempt in range(20):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.replace(target)
            return
        except FileNotFoundError:  # the folder was empty, and someone removed it at this moment
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
    """Turn the operating system's refusals into one line."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename or where
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({size(shutil.disk_usage(where).free)} free)"
            raise Fault(f"{where}: the disk is full{free}; free some, or take another folder") from None
        raise Fault(f"{path}: {error.strerror or error}; {where} must be a folder that can be written") from None
