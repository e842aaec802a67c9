"""Work on one chunk of a source: rows are read, converted to tokens, and stored in a file of the spool.

The file's facts give the reasons why rows were dropped: the number for each reason, and the places of the first ones.
"""

import json
from collections.abc import Sequence
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
from trainer.data.rows import Bad, Row, Rows
from trainer.data.tokens.chat import Unrendered
from trainer.data.tokens.templates import Template
from trainer.data.write import spool

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
    rows, _, facts = _understand(plan, chunk.load(), plan.shapes[chunk.part])
    keys = np.fromiter(map(choose.key, rows), np.uint64, len(rows))
    parts = np.full(len(rows), chunk.part, np.int16)
    spool.write(file, {"key": keys, "part": parts, "length": np.zeros(len(rows), np.int32)}, facts)


def encode(plan: Plan, chunk: Chunk, file: Path, chosen: np.ndarray | None) -> None:
    """Do all work on the chosen rows of a chunk."""
    loaded = chunk.load()
    rows, positions, facts = _understand(plan, loaded, plan.shapes[chunk.part])
    if chosen is not None:
        rows = [row for row, take in zip(rows, chosen, strict=True) if take]
        positions = [position for position, take in zip(positions, chosen, strict=True) if take]
    facts["cut"], facts["cut_tokens"], facts["anomalies"], facts["places"] = 0, 0, {}, []
    batches = [
        _batch(plan, rows[at : at + BATCH], positions[at : at + BATCH], loaded, facts, chunk.part)
        for at in range(0, len(rows), BATCH)
    ]
    empty = _arrays([], [], plan, chunk.part) | _places([], loaded, facts)
    names = empty if not batches else batches[0]
    arrays = {name: np.concatenate([batch[name] for batch in batches or [empty]]) for name in names}
    spool.write(file, arrays, facts)


def _understand(plan: Plan, loaded: Rows, shape: Shape) -> tuple[list[Row], list[int], dict[str, Any]]:
    """Return the canonical rows, the index of each in the chunk, and the facts on the others."""
    facts: dict[str, Any] = {"read": len(loaded.values), "dropped": {}}
    rows, positions = [], []
    for position, value in enumerate(loaded.values):
        row = value if isinstance(value, Bad) else shape.row(value)
        if isinstance(row, Bad):
            _drop(facts, row, loaded, position)
        else:
            rows.append(row)
            positions.append(position)
    return rows, positions, facts


def _batch(
    plan: Plan, rows: list[Row], positions: list[int], loaded: Rows, facts: dict[str, Any], part: int
) -> dict[str, np.ndarray]:
    kept, encoded = [], []
    places = []
    try:
        results = plan.template.encode(rows)
    except Unrendered as error:
        raise Fault(f"{loaded.place(positions[error.row])}: {error}") from None
    for row, position, result in zip(rows, positions, results, strict=True):
        if isinstance(result, Bad):
            _drop(facts, result, loaded, position)
            continue
        kept.append(row)
        encoded.append(result)
        places.append(position)
        if result.cut:
            facts["cut"] += 1
            facts["cut_tokens"] += result.cut
    for name, indexes in plan.template.checks(encoded, kept).items():
        if indexes:
            entry = facts["anomalies"].setdefault(name, {"count": 0, "samples": []})
            entry["count"] += len(indexes)
            missing = ANOMALOUS - len(entry["samples"])
            entry["samples"] += [loaded.place(places[at]) for at in indexes[: max(0, missing)]]
    return _arrays(kept, encoded, plan, part) | _places(places, loaded, facts)


def _places(positions: list[int], loaded: Rows, facts: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the line or number of each row, and the index of the text before it, which all rows of a file share."""
    texts = [loaded.place(position) for position in positions]
    stems = [text.rstrip("0123456789") for text in texts]
    facts["places"] += [stem for stem in dict.fromkeys(stems) if stem not in facts["places"]]
    index = {stem: number for number, stem in enumerate(facts["places"])}
    numbers = (int(text[len(stem) :] or 0) for text, stem in zip(texts, stems, strict=True))
    return {
        "number": np.fromiter(numbers, np.int64, len(texts)),
        "file": np.array([index[stem] for stem in stems], np.int16),
    }


def _arrays(rows: list[Row], encoded: Sequence[Any], plan: Plan, part: int) -> dict[str, np.ndarray]:
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
        "learned": _sums(learned, lengths),
        "key": keys,
        "asked": _prompt_keys(rows),
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


def _prompt_keys(rows: list[Row]) -> np.ndarray:
    """Return keys of the texts before the answers: a test prompt that training has seen is a leak."""
    shown = (row.get("chosen", row) for row in rows)
    prompts = (
        {"messages": row["messages"][:-1]} if "messages" in row else {"text": row.get("input") or row["text"]}
        for row in shown
    )
    return np.fromiter(map(choose.key, prompts), np.uint64, len(rows))


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if not len(lengths):
        return np.empty(0, np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])
    return np.add.reduceat(values, starts, dtype=np.int32)


def _drop(facts: dict[str, Any], bad: Bad, loaded: Rows, position: int) -> None:
    entry = facts["dropped"].setdefault(bad.reason, {"count": 0, "samples": []})
    entry["count"] += 1
    if len(entry["samples"]) < SAMPLES:
        entry["samples"].append({"place": loaded.place(position), "field": bad.field, "shown": bad.shown})
