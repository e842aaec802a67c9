"""Parts of a reference's scores: each rank writes its own, and they are joined when all rows have scores.

    <paths.reference>/unfinished/what.json            the rows and the scoring model
    <paths.reference>/unfinished/<split>-*.npz        scores of one rank since its last part

A part has the numbers of its rows. After a kill the command continues with the rows that are in no part, at any layout
and on any hosts; parts of other rows or of another model are removed. The ranks send the names of their parts to the
rank that joins them, because a network file system may list files of other hosts seconds late.
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
# A part is written after this share of the time so far, so long runs write few files, and after at least these seconds.
SHARE, LEAST = 0.02, 5.0


def begin(folder: Path, facts: dict[str, Any]) -> None:
    """Keep the parts of an earlier attempt if its facts are the same. One rank calls it, before any rank writes."""
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
    """Names of the parts in the folder."""
    return sorted(path.name for path in (folder / JOURNAL).glob("*.npz"))


def missing(folder: Path, split: str, rows: int) -> np.ndarray:
    """Numbers of the rows that are in no part, in order."""
    is_missing = np.ones(rows, bool)
    for part in _parts(folder, split, names(folder)):
        is_missing[part["rows"]] = False
    return np.flatnonzero(is_missing)


class Parts:
    """Files with one rank's scores of a split."""

    def __init__(self, folder: Path, split: str):
        self.place, self.split = folder / JOURNAL, split
        self.began = self.written = time.monotonic()
        self.names: list[str] = []  # of files
        self.rows: list[int] = []
        self.scores: list[tuple[np.ndarray, ...]] = []

    def add(self, row: int, *scores: np.ndarray) -> None:
        """Add the scores of a row: values, and with a teacher their tokens, each with an entry for each position."""
        self.rows.append(row)
        self.scores.append(scores)

    def write(self, last: bool = False) -> None:
        """Write the scores since the last part, if enough time has passed or `last` is true."""
        now = time.monotonic()
        if not self.rows or not (last or now - self.written > max(LEAST, SHARE * (now - self.began))):
            return
        arrays = dict(zip(references.ARRAYS, map(np.concatenate, zip(*self.scores, strict=True)), strict=False))
        lengths = [len(of_row[0]) for of_row in self.scores]
        name = f"{self.split}-{secrets.token_hex(8)}.npz"
        with open_atomically(self.place / name, durable=True) as file:
            np.savez(file, rows=np.array(self.rows), lengths=np.array(lengths), **arrays)
        self.names.append(name)
        self.written, self.rows, self.scores = now, [], []


def join(folder: Path, split: str, rows: int, written: Sequence[str]) -> None:
    """Write the files that training reads, from the parts with these names. Only one part at a time is in memory."""
    lengths = np.full(rows, -1, np.int64)
    for part in _parts(folder, split, written):
        lengths[part["rows"]] = part["lengths"]
    if len(unscored := np.flatnonzero(lengths < 0)):
        raise RuntimeError(f"{folder}: {len(unscored)} rows of {split} have no score, the first is row {unscored[0]}")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    with references.written(folder, split, starts) as put:
        for part in _parts(folder, split, written):
            arrays = [part[name] for name in references.ARRAYS if name in part]
            ends = np.cumsum(part["lengths"])
            for row, length, stop in zip(part["rows"], part["lengths"], ends, strict=True):
                put(int(starts[row]), *(array[stop - length : stop] for array in arrays))


def _parts(folder: Path, split: str, written: Sequence[str]) -> Iterator[Any]:
    """Parts of a split. Each loads its arrays on access."""
    for name in written:
        if name.startswith(f"{split}-"):
            with np.load(folder / JOURNAL / name) as part:
                yield part
