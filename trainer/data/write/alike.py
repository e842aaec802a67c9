"""Rows that are alike: copies, near copies and leaks, where each lies, and which are dropped.

    find(spool, kept, split) -> Alike       of all rows that are kept
    dropped(found, data) -> mask            those that data.near_copies and data.leaks leave out
    write(folder, found, ...) -> facts      alike.jsonl, which lists them all, and what report.json says of it

A leak is a row of validation or of the test that is nearly a row of training, or has its prompt, or a row of the test
that is nearly one of validation. trainer/data/read/likeness.py says how near copies are found, and how surely.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from conf.schema.data import Data
from trainer.data.read import choose, likeness
from trainer.data.read.choose import SPLITS
from trainer.data.write.spool import Spool

FILE = "alike.jsonl"
SAMPLES = 5  # pairs of numbers in the report
SHOWN = 10  # pairs of each kind in the report
BLOCK = 20_000  # rows whose signatures are compared at once
COPY, NEAR, LEAK = "copy", "near copy", "leak"


@dataclass(frozen=True)
class Alike:
    """Likeness of the kept rows, each by its place among them."""

    split: np.ndarray
    like: np.ndarray  # the earlier row that it is like; -1 where there is none
    exact: np.ndarray  # whether it is a copy of that
    asked: np.ndarray  # key of its prompt

    @property
    def near(self) -> np.ndarray:
        return (self.like >= 0) & ~self.exact

    @property
    def across(self) -> np.ndarray:
        """Whether the row and the one that it is like are of two splits."""
        return (self.like >= 0) & (self.split != self.split[np.maximum(self.like, 0)])

    def only(self, taken: np.ndarray) -> "Alike":
        """Likeness of the rows that are taken. What was like one that is not is like none."""
        place = np.cumsum(taken, dtype=np.int32) - 1
        like = np.where((self.like >= 0) & taken[np.maximum(self.like, 0)], place[np.maximum(self.like, 0)], -1)
        return Alike(
            self.split[taken], like[taken].astype(np.int32), (self.exact & (like >= 0))[taken], self.asked[taken]
        )


def find(spool: Spool, kept: np.ndarray, split: np.ndarray) -> Alike:
    numbers = np.arange(len(kept), dtype=np.int32)
    like = likeness.first_equal(spool.column("key", np.uint64, kept))
    exact = like != numbers
    like[~exact] = -1
    near = np.zeros(len(kept), bool)
    for number in range(likeness.BANDS):
        head = likeness.first_equal(spool.column(f"band{number}", np.uint64, kept))
        rows = np.flatnonzero((head != numbers) & ~exact & ~near)
        for block in np.array_split(rows, max(1, len(rows) // BLOCK)):
            same = likeness.agree(_signatures(spool, kept[block]), _signatures(spool, kept[head[block]]))
            near[block[same]] = True
            like[block[same]] = head[block[same]]
    return Alike(split, like, exact, spool.column("asked", np.uint64, kept))


def counts(found: Alike, kept: np.ndarray) -> dict[str, dict[str, Any]]:
    """Numbers of the rows that are alike, as report.json has them."""
    near, held_out = np.flatnonzero(found.near), found.split != 0
    samples = [[int(kept[row]), int(kept[found.like[row]])] for row in near[:SAMPLES]]
    prompts = int(np.isin(found.asked[held_out], found.asked[~held_out]).sum()) if held_out.any() else 0
    return {
        "duplicates": {"exact": int(found.exact.sum()), "near": len(near), "samples": samples},
        "overlap": {"exact": prompts, "near": int((found.near & found.across).sum())},
    }


def dropped(found: Alike, data: Data) -> np.ndarray:
    """Whether each row is left out: copies, near copies within a split, and rows of training that are held out, too.

    Of validation go the rows that the test has. Rows that are like the same earlier row count as like one another.
    """
    gone = np.zeros(len(found.split), bool)
    if data.duplicates == "drop" and not choose.first_pass(data):
        gone |= found.exact
    if data.near_copies == "drop":
        gone |= found.near & ~found.across
    if data.leaks == "drop":
        head = np.where(found.like >= 0, found.like, np.arange(len(gone), dtype=np.int32))
        for split, held in ((0, found.split != 0), (1, found.split == 2)):
            marked = held.copy()
            marked[head[held]] = True
            gone |= (marked | marked[head] | np.isin(found.asked, found.asked[held])) & (found.split == split)
    return gone


def write(folder: Path, found: Alike, gone: np.ndarray, spool: Spool, kept: np.ndarray) -> dict[str, Any]:
    """List the rows that are alike. Returns what the report says of the list; nothing where no row is like another."""
    total: Counter[str] = Counter()
    samples: dict[str, list[dict[str, Any]]] = {}
    pairs = _pairs(found)
    if not len(pairs[0]):
        return {}
    with (folder / FILE).open("wb") as file:
        for entry in _entries(pairs, found, gone, _Places(spool, kept)):
            kind = entry["kind"]
            total[kind] += 1
            if total[kind] <= SHOWN:
                samples.setdefault(kind, []).append(entry)
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
    return {"alike": {"file": FILE, "counts": {kind: total[kind] for kind in (LEAK, COPY, NEAR)}, "samples": samples}}


def _pairs(found: Alike) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are listed, in order, and what each is like: for one held out, a training row of its prompt first."""
    other = found.like.copy()
    training, held = np.flatnonzero(found.split == 0), found.split != 0
    keys, first = np.unique(found.asked[training], return_index=True)
    asks = np.flatnonzero(held & ~found.across)
    if len(keys) and len(asks):
        place = np.minimum(np.searchsorted(keys, found.asked[asks]), len(keys) - 1)
        same = keys[place] == found.asked[asks]
        other[asks[same]] = training[first[place[same]]]
    rows = np.flatnonzero(other >= 0)
    return rows, other[rows]


def _entries(
    pairs: tuple[np.ndarray, np.ndarray], found: Alike, gone: np.ndarray, places: "_Places"
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(pairs[0]), BLOCK):
        rows, others = (some[start : start + BLOCK] for some in pairs)
        told = zip(rows.tolist(), others.tolist(), places.of(rows), places.of(others), strict=True)
        for row, other, place, where in told:
            split, beside = int(found.split[row]), int(found.split[other])
            kind = LEAK if split != beside else COPY if found.exact[row] else NEAR
            why = "prompt" if found.like[row] != other else "copy" if found.exact[row] else "near copy"
            entry = {"kind": kind, "row": place, "split": SPLITS[split], "like": where, "of": SPLITS[beside], "by": why}
            yield entry | {"dropped": [place for at, place in ((row, place), (other, where)) if gone[at]]}


class _Places:
    """File and line of rows, or whatever their source has in place of lines."""

    def __init__(self, spool: Spool, kept: np.ndarray):
        self.spool, self.kept = spool, kept

    def of(self, rows: np.ndarray) -> list[str]:
        order = np.argsort(rows, kind="stable")
        wanted = self.kept[rows[order]]
        numbers = self.spool.column("number", np.int64, wanted)
        files = self.spool.column("file", np.int16, wanted)
        names = [""] * len(rows)
        bounds = np.searchsorted(wanted, self.spool.starts)
        for chunk, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            stems = self.spool.chunk(chunk).facts["places"] if end > start else []
            for at in range(start, end):
                names[int(order[at])] = f"{stems[files[at]]}{numbers[at]}"
        return names


def _signatures(spool: Spool, rows: np.ndarray) -> np.ndarray:
    width = likeness.HASHES
    found = np.empty((len(rows), width), np.uint32)
    chunks = np.searchsorted(spool.starts, rows, side="right") - 1
    for number in np.unique(chunks):
        mine = np.flatnonzero(chunks == number)
        table = spool.chunk(int(number)).read("signature").reshape(-1, width)
        found[mine] = table[rows[mine] - spool.starts[number]]
    return found
