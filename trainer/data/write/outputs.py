"""Write the files that training and evaluation read, from the spool, and the report on them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from contract.faults import Fault
from trainer.data import indexed
from trainer.data.read.choose import SPLITS
from trainer.data.write import alike, packing, report
from trainer.data.write.chunks import Plan
from trainer.data.write.spool import Answers, Sequences, Spool
from trainer.data.write.work import Done

BLOCK = 1 << 22  # bytes written at once
BATCH = 4096  # documents written at once


def write(plan: Plan, spool: Spool, done: Done, folder: Path) -> dict[str, Any]:
    """Write the files. Return the report."""
    kept = np.arange(int(spool.starts[-1]), dtype=np.int32)  # columns are read when they are needed
    split = spool.column("split", np.int8, kept)
    _check_splits(split, plan)
    like = alike.find(spool, kept, split)
    out = alike.dropped(like, plan.data)
    facts: dict[str, Any] = {"tokens": {}, "packing": {}, "alike": alike.write(folder, like, out, spool, kept)}
    copies = int(like.exact.sum()) if alike.drops_copies(plan.data) else 0
    facts["dropped"], copies = int(out.sum()) - copies, done.copies + copies
    if out.any():
        kept, like = kept[~out], like.only(~out)
        _check_splits(like.split, plan)
    for number, name in enumerate(SPLITS):
        rows = kept[like.split == number]
        sequences = Sequences(spool, rows)
        facts["tokens"][name] = report.lengths(sequences.lengths, spool.column("learned", np.int32, rows))
        if not len(rows):
            continue
        if plan.template.kind == "text":
            indexed.write(folder / name, _documents(sequences), len(plan.template.tokenizer))
            continue
        lines = folder / f"{name}.jsonl"
        indexed.write_lines(lines, _write_lines(lines, sequences))
        if name != "test":
            facts["packing"] |= _write_tokens(name, sequences, plan, folder)
    return _report(facts, plan, spool, done, kept, like, copies)


def _write_tokens(name: str, sequences: Sequences, plan: Plan, folder: Path) -> dict[str, Any]:
    """Write the files that training reads. Return, for packed sequences, their statistics."""
    from trainer.data.write import sequences_file  # pyarrow's libraries are 90 MB; import only to write

    lengths, data, end = sequences.lengths, plan.data, plan.template.tokenizer.eos_token_id
    path = folder / f"{name}.idx.parquet"
    if plan.compares or not data.packed:
        source, each = (Answers(sequences), 2) if plan.compares else (sequences, 1)
        order = np.arange(len(source.lengths), dtype=np.int32)
        sequences_file.write(path, source, order, np.arange(0, len(order) + 1, each), pad_to=None, pad_id=end)
        return {}
    padded = packing.padded(lengths, plan.multiple)
    order, bounds = packing.assign(padded, data.seq_length, data.seed)
    sequences_file.write(path, sequences, order, bounds, pad_to=plan.multiple, pad_id=end)
    return {name: report.packing(lengths, padded, bounds, data.seq_length, plan.multiple)}


def _write_lines(path: Path, sequences: Sequences) -> np.ndarray:
    """Write lines of JSON. Return the offsets of the line ends."""
    spool, rows = sequences.spool, sequences.rows
    with path.open("wb") as file:
        for chunk, start, end in spool.runs(rows, "line"):
            for at in range(start, end, BLOCK):
                file.write(chunk.read("lines", at, min(at + BLOCK, end)).data)
    ends = np.cumsum(spool.column("line", np.int32, rows), dtype=np.int64)
    ends -= 1
    return ends


def _documents(sequences: Sequences) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(sequences.rows), BATCH):
        part = np.arange(start, min(start + BATCH, len(sequences.rows)))
        yield sequences.tokens(part)[0], sequences.lengths[part]


def _check_splits(split: np.ndarray, plan: Plan) -> None:
    counts = np.bincount(split, minlength=len(SPLITS))
    if not counts.sum():
        raise Fault("data: no row is left; check data.bad_rows, data.too_long and the source")
    if any(fixed is not None for fixed in plan.splits):
        return
    data = plan.data
    if not counts[0]:
        raise Fault(f"data: none of {counts.sum()} rows is in training; use more rows, or smaller other shares")
    for name, share, count in zip(SPLITS[1:], (data.validation, data.test), counts[1:], strict=True):
        if share and not count:
            raise Fault(f"data.{name}: none of {counts.sum()} rows is in {name}; use more rows or a larger share")


def _report(
    parts: dict[str, Any], plan: Plan, spool: Spool, done: Done, kept: np.ndarray, like: alike.Alike, copies: int
) -> dict[str, Any]:
    facts = spool.facts()
    counts = {name: int((like.split == number).sum()) for number, name in enumerate(SPLITS)}
    dropped = report.merged(facts, "dropped")
    if copies:
        dropped["copy of an earlier row"] = {"count": copies, "samples": []}
    if parts["dropped"]:
        dropped[f"like another row, in {alike.FILE}"] = {"count": parts["dropped"], "samples": []}
    cut, tokens = sum(fact["cut"] for fact in facts), sum(fact["cut_tokens"] for fact in facts)
    total = sum(entry["tokens"] for entry in parts["tokens"].values())
    result = {
        "rows": {"read": sum(done.rows), "kept": len(kept), "not_chosen": done.left - done.copies} | counts,
        "dropped": dropped,
        "tokens": parts["tokens"],
        "truncated": {"rows": cut, "share": round(cut / len(kept), 6), "tokens_cut": tokens},
        **alike.counts(like, kept),
        **parts["alike"],
        "learned_share": round(sum(entry["learned"] for entry in parts["tokens"].values()) / total, 6),
        "anomalies": report.merged(facts, "anomalies"),
        "template": plan.template.record(),
        "example": _example(spool, kept, plan),
    }
    if plan.compares:
        result["compares"] = True
    if parts["packing"]:
        result["packing"] = parts["packing"]
    result["warnings"] = report.warnings(result)
    return result


def _example(spool: Spool, kept: np.ndarray, plan: Plan) -> dict[str, Any]:
    """Return the first row as the model reads it, and the spans of its learned characters."""
    ids, learned = Sequences(spool, kept[:1]).tokens(np.arange(1))
    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    text, marks = "", []
    for start, end in itertools.pairwise(bounds):
        piece = plan.template.tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
        if learned[start]:
            marks.append([len(text), len(text) + len(piece)])
        text += piece
    return {"text": text, "learned": marks}
