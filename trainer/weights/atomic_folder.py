"""A folder that all ranks of a command write together, and that is there whole or not at all.

Everything is written into <folder>.partial, on storage that all ranks see. What was there before under the same name
stays until the new folder is complete: synced to disk, marked (contract/checkpoints.py), and then given the name in one
step (contract/output_marks.py). A rank that fails takes the partial folder with it; what a killed process leaves is
removed by the next attempt, or gone on with where that makes the very same, to the very end. Where a link has the name,
the folder that it leads to is replaced, on its own disk.
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
from contract.files import sync, write_atomically
from contract.output_marks import JOURNAL, PARTIAL, Kind, check_one, take

# Megatron's writer processes pass on that they failed, and not why.
FAILED = ("No space left on device", "CheckpointException ranks")
GIVEN_WAY = 10.0  # seconds
MADE, OF = "what.txt", "of.txt"  # in the journal: what is being made, and the number of the folder
ASIDE = ".journal"  # beside an output: the journal of a folder that is whole, until it is in its place


@contextlib.contextmanager
def write(folder: Path, facts: dict[str, Any], kind: Kind, made: str = "") -> Iterator[Path]:
    """Yield the folder to write into. `facts` go into the mark, as they are when the block ends on rank 0.

    `made` tells what is made from anything else. With it, an attempt that was killed is gone on with: the folder holds
    what that has left, and a folder JOURNAL to note in what is finished.
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
            if not made or _read(partial / JOURNAL / MADE) != made:
                output_marks.remove(partial, kind)
                take(partial, kind)
            if made:
                (partial / JOURNAL).mkdir(exist_ok=True)
                write_atomically(partial / JOURNAL / MADE, made, durable=False)
        barrier()
        yield partial
        barrier()
        if first:
            _sync(partial)
            if made:
                _put_aside(partial, journal)
            checkpoints.mark(partial, **facts)
            output_marks.finished(partial)
            output_marks.put_in_place(partial, place, kind)
            _remove(journal)
        barrier()
    except BaseException as error:
        full = _is_of_the_disk(error)
        if isinstance(error, Fault) and not partial.exists():
            time.sleep(GIVEN_WAY)  # another rank has failed, and has to say why: it ends this one
        if full or not made or isinstance(error, Fault):  # else the next attempt goes on
            with contextlib.suppress(OSError, output_marks.Foreign):  # another rank may be at it as well
                output_marks.remove(partial, kind)
                _remove(journal)
        if full:
            text = f"{folder}: could not be written, the disk is full or fails; what there was of it is removed again"
            raise Fault(text) from error
        raise


def _put_aside(partial: Path, journal: Path) -> None:
    """Take the journal out of a folder that is whole. To remove it there would lose what is finished, if killed."""
    (partial / JOURNAL / OF).write_text(_number(partial))
    if os.path.lexists(journal):  # somebody else's
        shutil.rmtree(partial / JOURNAL)
    else:
        (partial / JOURNAL).rename(journal)


def _bring_back(journal: Path, partial: Path, kind: Kind) -> None:
    """Put the journal of a folder that was whole, and not yet in its place, back into it. Any other is of no use."""
    if _read(journal / OF) == _number(partial) and not (partial / JOURNAL).exists():
        output_marks.begin(partial, kind)
        (partial / checkpoints.MARK).unlink(missing_ok=True)
        journal.rename(partial / JOURNAL)
    _remove(journal)


def _remove(journal: Path) -> None:
    """Remove a journal that was put aside. What else has the name stays."""
    if (journal / OF).is_file() and (journal / MADE).is_file():
        shutil.rmtree(journal, ignore_errors=True)


def _number(folder: Path) -> str:
    """The folder's number on its disk, which goes with it where it is renamed."""
    try:
        return str(folder.stat().st_ino)
    except OSError:
        return "none"


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def barrier() -> None:
    if ranks() > 1:
        import torch.distributed

        torch.distributed.barrier()


def gather(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
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


def _sync(folder: Path) -> None:
    for file in (path for path in folder.rglob("*") if path.is_file()):
        sync(file)


def _is_of_the_disk(error: BaseException | None) -> bool:
    """Whether the error is of the disk, also where a library has wrapped it, or passes on only its text."""
    while error is not None:
        text = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or any(sign in text for sign in FAILED):
            return True
        error = error.__cause__ or error.__context__
    return False
