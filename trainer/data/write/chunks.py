"""Work on one chunk of a source: read its rows, convert them to tokens, and store them in a file of the spool.

The file's facts have each reason for dropped rows, with the number of rows and the places of the first rows.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from conf.schema.data import Data
from contract.faults import Fault
from trainer.data.read import choose, likeness
from trainer.data.read.shapes import Shape
from trainer.data.read.sources import Chunk
from trainer.data.rows import Bad, Row
from trainer.data.tokens import anomalies
from trainer.data.tokens.chat import Unrendered
from trainer.data.tokens.template_text import Encoded
from trainer.data.tokens.templates import Template
from trainer.data.write import report, spool

BATCH = 512  # rows encoded at once; more would only use more memory
SAMPLES = 3  # rows shown of each reason in a chunk
TOO_LONG = ("longer than a sequence", "answer longer than a sequence")
ANOMALOUS = 3  # rows shown of each anomaly in a chunk


@dataclass(frozen=True)
class Plan:
    """Settings common to all chunks."""

    data: Data
    shapes: tuple[Shape, ...]  # of each part
    splits: tuple[int | None, ...]  # of each part: its index in SPLITS if fixed; None: split by content
    template: Template
    multiple: int  # of the lengths of packed rows
    folder: Path

    @property
    def compares(self) -> bool:
        """Whether rows are two answers to one prompt."""
        return any(shape.kind == "preference" for shape in self.shapes)


def path(folder: Path, part: int, chunk: int, kind: str) -> Path:
    return folder / f"{kind}-{part}-{chunk:07d}.chunk"


def scan(plan: Plan, chunk: Chunk, file: Path) -> None:
    """Do only the work on a chunk that is needed to choose rows."""
    work = _Work(plan, chunk)
    count = len(work.rows)
    keys = np.fromiter((choose.key(row) for _, row in work.rows), np.uint64, count)
    parts = np.full(count, chunk.part, np.int16)
    spool.write(file, {"key": keys, "part": parts, "length": np.zeros(count, np.int32)}, work.facts)


def encode(plan: Plan, chunk: Chunk, file: Path, chosen: np.ndarray | None) -> None:
    """Do all work on the chosen rows of a chunk."""
    work = _Work(plan, chunk)
    rows = work.rows
    if chosen is not None:
        rows = [row for row, taken in zip(rows, chosen, strict=True) if taken]
    batches = [work.arrays(rows[at : at + BATCH]) for at in range(0, max(1, len(rows)), BATCH)]
    spool.write(file, {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, work.facts)


class _Work:
    """The rows of a chunk, and the facts on them."""

    def __init__(self, plan: Plan, chunk: Chunk):
        self.plan, self.part, self.loaded = plan, chunk.part, chunk.load()
        self.facts: dict[str, Any] = {"read": len(self.loaded.values), "dropped": {}, "anomalies": {}}
        self.facts |= {"cut": 0, "cut_tokens": 0, "places": [self.loaded.source]}
        self.rows: list[tuple[int, Row]] = []  # canonical rows, and the index of each in the chunk
        shape = plan.shapes[chunk.part]
        for position, value in enumerate(self.loaded.values):
            row = value if isinstance(value, Bad) else shape.row(value)
            if isinstance(row, Bad):
                self._drop(row, position)
            else:
                self.rows.append((position, row))

    def arrays(self, rows: list[tuple[int, Row]]) -> dict[str, np.ndarray]:
        """Convert rows to tokens. Return the arrays of those that are kept."""
        kept: list[tuple[int, Row]] = []
        encoded: list[Encoded] = []
        try:
            results = self.plan.template.encode([row for _, row in rows])
        except Unrendered as error:
            raise Fault(f"{self.loaded.place(rows[error.row][0])}: {error}") from None
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Bad):
                self._drop(result, row[0])
                continue
            kept.append(row)
            encoded.append(result)
            self.facts["cut"] += result.cut > 0
            self.facts["cut_tokens"] += result.cut
        places = [position for position, _ in kept]
        for name, indexes in anomalies.find(self.plan.template, encoded, [row for _, row in kept]).items():
            if indexes:
                shown = [self.loaded.place(places[at]) for at in indexes[:ANOMALOUS]]
                report.count(self.facts["anomalies"], name, len(indexes), shown, ANOMALOUS)
        numbers = np.array([self.loaded.numbers[position] for position in places], np.int64)
        return _arrays([row for _, row in kept], encoded, self.plan, self.part) | {"number": numbers}

    def _drop(self, bad: Bad, position: int) -> None:
        sample = {"place": self.loaded.place(position), "field": bad.field, "shown": bad.shown}
        report.count(self.facts["dropped"], bad.reason, 1, [sample], SAMPLES)


def _arrays(rows: list[Row], encoded: list[Encoded], plan: Plan, part: int) -> dict[str, np.ndarray]:
    lengths = np.array([len(row.ids) for row in encoded], np.int32)
    ids = np.concatenate([row.ids for row in encoded]) if encoded else np.empty(0, np.int32)
    learned = np.concatenate([row.learned for row in encoded]) if encoded else np.empty(0, bool)
    keys = np.fromiter(map(choose.key, rows), np.uint64, len(rows))
    split = plan.splits[part]
    signature = likeness.signatures(ids, lengths)
    lines = [] if plan.template.kind == "text" else [_line(plan.template.line(row)) for row in rows]
    arrays = {
        "tokens": ids.astype(np.uint32) | np.where(learned, spool.LEARNED, np.uint32(0)),
        "length": lengths,
        "learned": np.array([row.learned.sum() for row in encoded], np.int32),
        "key": keys,
        "asked": np.fromiter(map(_prompt_key, rows), np.uint64, len(rows)),
        "split": choose.splits(keys, plan.data) if split is None else np.full(len(rows), split, np.int8),
        "lines": np.frombuffer(b"".join(lines), np.uint8),
        "line": np.array([len(line) for line in lines], np.int32),
        "signature": signature.ravel(),
    }
    if plan.compares:
        arrays["first"] = np.array([row.first for row in encoded], np.int32)
    return arrays | {f"band{number}": band for number, band in enumerate(likeness.bands(signature))}


def _line(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _prompt_key(row: Row) -> int:
    """Return a key of the text before the answer: a test prompt that training has seen is a leak."""
    shown = row.get("chosen", row)
    if "messages" in shown:
        return choose.key({"messages": shown["messages"][:-1]})
    return choose.key({"text": shown.get("input") or shown["text"]})
