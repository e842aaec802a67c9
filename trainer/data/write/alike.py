"""Similar rows: copies, near copies and leaks. This module finds them, lists their places, and selects rows to drop.

    find(spool, kept, split) -> Alike       for all kept rows
    dropped(alike, data) -> mask            rows that data.near_copies and data.leaks leave out
    write(folder, alike, ...) -> facts      alike.jsonl, which lists all similar rows, and its summary for report.json

A leak is a row of validation or test that is nearly a row of training or has the same prompt, or a row of test that is
nearly one of validation. trainer/data/read/likeness.py describes how near copies are found, and how reliably.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from conf.schema.data import Data
from trainer.data.read import choose, likeness
from trainer.data.write.spool import Spool

FILE = "alike.jsonl"
SAMPLES = 5  # pairs of numbers in the report
SHOWN = 10  # pairs of each kind in the report
BLOCK = 20_000  # rows whose signatures are compared at once
COPY, NEAR, LEAK = "copy", "near copy", "leak"


@dataclass(frozen=True)
class Alike:
    """Similarity of the kept rows. Indices count the kept rows only."""

    split: np.ndarray
    like: np.ndarray  # the similar earlier row; -1 if none
    exact: np.ndarray  # whether it is a copy of that row
    prompt: np.ndarray  # key of its prompt

    @property
    def near(self) -> np.ndarray:
        return (self.like >= 0) & ~self.exact

    @property
    def across(self) -> np.ndarray:
        """Whether the row and the similar one are of different splits."""
        return (self.like >= 0) & (self.split != self.split[np.maximum(self.like, 0)])

    def only(self, taken: np.ndarray) -> "Alike":
        """Return the similarity of the taken rows. A row that is similar to a removed row counts as similar to none."""
        place = np.cumsum(taken, dtype=np.int32) - 1
        like = np.where((self.like >= 0) & taken[np.maximum(self.like, 0)], place[np.maximum(self.like, 0)], -1)
        return Alike(
            self.split[taken], like[taken].astype(np.int32), (self.exact & (like >= 0))[taken], self.prompt[taken]
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


def counts(alike: Alike, kept: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return the numbers of similar rows for report.json."""
    near, held_out = np.flatnonzero(alike.near), alike.split != 0
    samples = [[int(kept[row]), int(kept[alike.like[row]])] for row in near[:SAMPLES]]
    prompts = int(np.isin(alike.prompt[held_out], alike.prompt[~held_out]).sum()) if held_out.any() else 0
    return {
        "duplicates": {"exact": int(alike.exact.sum()), "near": len(near), "samples": samples},
        "overlap": {"exact": prompts, "near": int((alike.near & alike.across).sum())},
    }


def drops_copies(data: Data) -> bool:
    """Whether this module leaves out copies, because the choice of rows has not done it already."""
    return data.duplicates == "drop" and not choose.first_pass(data)


def dropped(alike: Alike, data: Data) -> np.ndarray:
    """Return which rows are left out: copies, near copies within a split, and training rows that are also held out.

    Validation loses the rows that test has. Rows similar to the same earlier row count as similar to one another.
    """
    out = np.zeros(len(alike.split), bool)
    if drops_copies(data):
        out |= alike.exact
    if data.near_copies == "drop":
        out |= alike.near & ~alike.across
    if data.leaks == "drop":
        head = np.where(alike.like >= 0, alike.like, np.arange(len(out), dtype=np.int32))
        for split, held in ((0, alike.split != 0), (1, alike.split == 2)):
            marked = held.copy()
            marked[head[held]] = True
            out |= (marked | marked[head] | np.isin(alike.prompt, alike.prompt[held])) & (alike.split == split)
    return out


def write(folder: Path, alike: Alike, dropped_rows: np.ndarray, spool: Spool, kept: np.ndarray) -> dict[str, Any]:
    """List the similar rows. Return the summary for the report; empty if no rows are similar."""
    total: Counter[str] = Counter()
    samples: dict[str, list[dict[str, Any]]] = {}
    pairs = _pairs(alike)
    if not len(pairs[0]):
        return {}
    with (folder / FILE).open("wb") as file:
        for entry in _entries(pairs, alike, dropped_rows, spool, kept):
            kind = entry["kind"]
            total[kind] += 1
            if total[kind] <= SHOWN:
                samples.setdefault(kind, []).append(entry)
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))
    return {"alike": {"file": FILE, "counts": {kind: total[kind] for kind in (LEAK, COPY, NEAR)}, "samples": samples}}


def _pairs(alike: Alike) -> tuple[np.ndarray, np.ndarray]:
    """Return the listed rows, in order, and the similar row of each; a held-out row prefers a training row of its
    prompt.
    """
    other = alike.like.copy()
    training, held_out = np.flatnonzero(alike.split == 0), alike.split != 0
    keys, first = np.unique(alike.prompt[training], return_index=True)
    candidates = np.flatnonzero(held_out & ~alike.across)
    if len(keys) and len(candidates):
        place = np.minimum(np.searchsorted(keys, alike.prompt[candidates]), len(keys) - 1)
        same = keys[place] == alike.prompt[candidates]
        other[candidates[same]] = training[first[place[same]]]
    rows = np.flatnonzero(other >= 0)
    return rows, other[rows]


def _entries(
    pairs: tuple[np.ndarray, np.ndarray], alike: Alike, dropped_rows: np.ndarray, spool: Spool, kept: np.ndarray
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(pairs[0]), BLOCK):
        rows, others = (part[start : start + BLOCK] for part in pairs)
        places, other_places = _places(spool, kept[rows]), _places(spool, kept[others])
        for row, other, place, other_place in zip(rows.tolist(), others.tolist(), places, other_places, strict=True):
            split, other_split = int(alike.split[row]), int(alike.split[other])
            kind = LEAK if split != other_split else COPY if alike.exact[row] else NEAR
            reason = "prompt" if alike.like[row] != other else "copy" if alike.exact[row] else "near copy"
            entry = {
                "kind": kind,
                "row": place,
                "split": choose.SPLITS[split],
                "like": other_place,
                "of": choose.SPLITS[other_split],
                "by": reason,
            }
            yield entry | {"dropped": [place for at, place in ((row, place), (other, other_place)) if dropped_rows[at]]}


def _places(spool: Spool, rows: np.ndarray) -> list[str]:
    """Return file and line of rows, or the equivalent of lines in their source."""
    numbers = _table(spool, "number", np.int64, 1, rows)[:, 0]
    chunks = spool.chunks_of(rows).tolist()
    return [f"{spool.chunk(at).facts['places'][0]}{number}" for at, number in zip(chunks, numbers, strict=True)]


def _signatures(spool: Spool, rows: np.ndarray) -> np.ndarray:
    return _table(spool, "signature", np.uint32, likeness.HASHES, rows)


def _table(spool: Spool, name: str, dtype: type, width: int, rows: np.ndarray) -> np.ndarray:
    """Return `width` values of each of these rows, in any order."""
    order = np.argsort(rows, kind="stable")
    return spool.table(name, dtype, width, rows[order])[np.argsort(order)]
