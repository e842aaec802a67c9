"""Parts of what a reference says of the rows: each rank writes its own, and they are joined once all are there.

    <paths.reference>/unfinished/what.json            of which rows, and who is asked
    <paths.reference>/unfinished/<split>-*.npz        what one rank has found out since its last part

A part names the rows that it is of. A command that was killed goes on with the rows that no part has, whatever the
layout and the hosts; a part of other rows, or of another model that was asked, is removed. Whoever joins parts is told
their names by those who wrote them: a network's file system may list what other hosts have written seconds later.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contract import json_object
from contract.files import open_atomically, write_atomically
from contract.output_marks import JOURNAL
from trainer.data import references

OF = "what.json"
# What a kill costs of the time so far: a share of it, so that hours make few files, and these seconds at least.
SHARE, LEAST = 0.02, 5.0


def begin(folder: Path, facts: dict[str, Any]) -> None:
    """Keep the parts of an attempt before if they are of the same. One rank does it, before any writes."""
    place = folder / JOURNAL
    if not (place / OF).exists() or json_object.read(place / OF) != facts:
        end(folder)
        place.mkdir(parents=True)
        write_atomically(place / OF, json.dumps(facts), durable=True)


def end(folder: Path) -> None:
    """Remove all parts."""
    if (folder / JOURNAL).exists():
        shutil.rmtree(folder / JOURNAL)


def names(folder: Path) -> list[str]:
    """Parts that are there."""
    return sorted(path.name for path in (folder / JOURNAL).glob("*.npz"))


def left(folder: Path, split: str, rows: int) -> np.ndarray:
    """Numbers of the rows that no part has, in order."""
    missing = np.ones(rows, bool)
    for part in _parts(folder, split, names(folder)):
        missing[part["rows"]] = False
    return np.flatnonzero(missing)


class Parts:
    """Files with the answers that one rank has found of a split."""

    def __init__(self, folder: Path, split: str):
        self.place, self.split = folder / JOURNAL, split
        self.began = self.written = time.monotonic()
        self.names: list[str] = []  # of files
        self.rows: list[int] = []
        self.found: list[tuple[np.ndarray, ...]] = []

    def add(self, row: int, *found: np.ndarray) -> None:
        """Add what is said of a row: values, and tokens that they are of. Both have a line for each place."""
        self.rows.append(row)
        self.found.append(found)

    def write(self, last: bool = False) -> None:
        """Write what was added, if it is time to, or the last of it."""
        now = time.monotonic()
        if not self.rows or not (last or now - self.written > max(LEAST, SHARE * (now - self.began))):
            return
        arrays = dict(zip(references.ARRAYS, map(np.concatenate, zip(*self.found, strict=True)), strict=False))
        lengths = [len(one[0]) for one in self.found]
        name = f"{self.split}-{secrets.token_hex(8)}.npz"
        with open_atomically(self.place / name, durable=True) as file:
            np.savez(file, rows=np.array(self.rows), lengths=np.array(lengths), **arrays)
        self.names.append(name)
        self.written, self.rows, self.found = now, [], []


def join(folder: Path, split: str, rows: int, made: Sequence[str]) -> None:
    """Write the files that training reads, of the parts of these names. A part at a time is in memory."""
    lengths = np.full(rows, -1, np.int64)
    for part in _parts(folder, split, made):
        lengths[part["rows"]] = part["lengths"]
    if len(missing := np.flatnonzero(lengths < 0)):
        raise RuntimeError(f"{folder}: of row {missing[0]} of {split} nothing was said, and of {len(missing)} in all")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    with references.written(folder, split, starts) as put:
        for part in _parts(folder, split, made):
            arrays = [part[name] for name in references.ARRAYS if name in part]
            ends = np.cumsum(part["lengths"])
            for row, length, stop in zip(part["rows"], part["lengths"], ends, strict=True):
                put(int(starts[row]), *(array[stop - length : stop] for array in arrays))


def _parts(folder: Path, split: str, made: Sequence[str]) -> Iterator[Any]:
    """Parts of a split. Each reads its arrays when it is asked for them."""
    for name in made:
        if name.startswith(f"{split}-"):
            with np.load(folder / JOURNAL / name) as part:
                yield part
