"""A folder that all ranks of a command write together, and that appears only when it is complete.

Everything is written into <folder>.partial, on storage that all ranks share. The previous folder of this name stays
until the new one is complete: synced to disk, marked (contract/checkpoints.py), and then renamed in one step
(contract/output_marks.py). A rank that fails removes the partial folder. If a process is killed, the next attempt
resumes from the partial folder if it writes exactly the same output, and removes it otherwise. If <folder> is a link,
the folder that it points to is replaced, on the disk of that folder.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract import checkpoints, output_marks
from contract.faults import Fault
from contract.files import is_partial, sync, write_atomically
from contract.output_marks import JOURNAL, PARTIAL, Kind, check_one, take

# Megatron's writer processes report that they failed, but not the cause.
FAILED = ("No space left on device", "CheckpointException ranks")
WAIT_FOR_CAUSE = 10.0  # seconds
STATE, OF = "what.txt", "of.txt"  # in the journal: the state to resume from, and the folder's inode
ASIDE = ".journal"  # next to an output: the journal of a complete folder, until the folder is renamed


@contextlib.contextmanager
def write(folder: Path, facts: dict[str, Any], kind: Kind, state: str) -> Iterator[Path]:
    """Yield the folder to write into. The mark gets `facts` as they are on rank 0 at the end of the block.

    A killed attempt of the same `state` is resumed: the folder has its files, and a folder JOURNAL for records of
    finished parts.
    """
    place, first = Path(os.path.realpath(folder)), rank() == 0
    partial, journal = place.with_name(place.name + PARTIAL), place.with_name(place.name + ASIDE)
    check_one(place, kind)
    check_one(partial, kind)
    barrier()
    try:
        if first:
            output_marks.recover(place, kind)
            _bring_back(journal, partial, kind)
            if _read(partial / JOURNAL / STATE) != state:
                output_marks.remove(partial, kind)
                take(partial, kind)
            (partial / JOURNAL).mkdir(exist_ok=True)
            write_atomically(partial / JOURNAL / STATE, state, durable=False)
        barrier()
        yield partial
        barrier()
        if first:
            for file in [*partial.rglob("*")]:
                if is_partial(file.name):  # of a killed attempt
                    file.unlink()
                elif file.is_file():
                    sync(file)
            _put_aside(partial, journal)
            checkpoints.mark(partial, **facts)
            output_marks.finished(partial)
            output_marks.put_in_place(partial, place, kind)
            _remove(journal)
        barrier()
    except BaseException as error:
        full = _is_of_the_disk(error)
        is_gone = isinstance(error, FileNotFoundError) or (isinstance(error, Fault) and not partial.exists())
        if ranks() > 1 and (is_gone or (full and not first)):  # the disk stays full until the first rank fails too
            time.sleep(WAIT_FOR_CAUSE)  # another rank reports the cause and ends this one
        if full or isinstance(error, Fault):  # otherwise the next attempt resumes
            with contextlib.suppress(OSError, output_marks.Foreign):  # another rank may be removing it too
                output_marks.remove(partial, kind)
                _remove(journal)
        if full:
            text = f"{folder}: could not be written, the disk is full or fails; the partial output is removed"
            raise Fault(text) from error
        raise


def _put_aside(partial: Path, journal: Path) -> None:
    """Move the journal out of a complete folder. If it were removed there, a kill could lose finished work."""
    (partial / JOURNAL / OF).write_text(_number(partial))
    if os.path.lexists(journal):  # a file of another program
        shutil.rmtree(partial / JOURNAL)
    else:
        (partial / JOURNAL).rename(journal)


def _bring_back(journal: Path, partial: Path, kind: Kind) -> None:
    """Move the journal back into a complete folder that was not renamed yet; any other journal is removed."""
    if _read(journal / OF) == _number(partial) and not (partial / JOURNAL).exists():
        output_marks.begin(partial, kind)
        (partial / checkpoints.MARK).unlink(missing_ok=True)
        journal.rename(partial / JOURNAL)
    _remove(journal)


def _remove(journal: Path) -> None:
    """Remove a journal that was put aside. A file of another program with this name stays."""
    if (journal / OF).is_file() and (journal / STATE).is_file():
        shutil.rmtree(journal, ignore_errors=True)


def _number(folder: Path) -> str:
    """Return the folder's inode, which a rename keeps."""
    try:
        return str(folder.stat().st_ino)
    except OSError:
        return "none"


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def barrier() -> None:
    gather(None)


def gather(value: Any) -> list[Any]:
    """Return every rank's value, on every rank."""
    values = [value]
    if ranks() > 1:
        import torch.distributed

        values = [None] * ranks()
        torch.distributed.all_gather_object(values, value)
    return values


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether a full disk caused the error, even if a library wrapped the error or reports only its text."""
    while error is not None:
        text = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(sign in text for sign in FAILED):
            return True
        error = error.__cause__ or error.__context__
    return False
