"""Writer of the files that training and evaluation read, from the spool, and of the report on them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from contract.faults import Fault
from trainer.data.read import choose
from trainer.data.read.choose import SPLITS
from trainer.data.write import alike, indexed, indexes, packing, report
from trainer.data.write.answers import Answers
from trainer.data.write.chunks import Plan
from trainer.data.write.spool import Sequences, Spool
from trainer.data.write.work import Done

BLOCK = 1 << 22  # bytes written at once
BATCH = 4096  # documents written at once


def write(plan: Plan, spool: Spool, done: Done, folder: Path) -> dict[str, Any]:
    """Write the files. Returns the report."""
    data = plan.data
    kept = np.arange(int(spool.starts[-1]), dtype=np.int32)  # columns of all rows are read where they are needed
    split = spool.column("split", np.int8, kept)
    _check_splits(split, plan)
    like = alike.find(spool, kept, split)
    gone = alike.dropped(like, data)
    found: dict[str, Any] = {"tokens": {}, "packing": {}, "alike": alike.write(folder, like, gone, spool, kept)}
    copies = int(like.exact.sum()) if data.duplicates == "drop" and not choose.first_pass(data) else 0
    found["dropped"], copies = int(gone.sum()) - copies, done.copies + copies
    if gone.any():
        kept, split, like = kept[~gone], split[~gone], like.only(~gone)
        _check_splits(split, plan)
    for number, name in enumerate(SPLITS):
        rows = kept[split == number]
        sequences = Sequences(spool, rows, spool.column("length", np.int32, rows))
        found["tokens"][name] = report.lengths(sequences.lengths, spool.column("learned", np.int32, rows))
        if not len(rows):
            continue
        if plan.template.kind == "text":
            indexed.write(folder / name, _documents(sequences), len(plan.template.tokenizer))
            continue
        lines = folder / f"{name}.jsonl"
        indexes.write(lines, _write_lines(lines, sequences))
        if name != "test":
            found["packing"] |= _write_tokens(name, sequences, plan, folder)
    return _report(found, plan, spool, done, kept, like, copies)


def _write_tokens(name: str, sequences: Sequences, plan: Plan, folder: Path) -> dict[str, Any]:
    """Write the files that training reads. Returns, for packed sequences, how full they are."""
    from trainer.data.write import sequences_file  # pyarrow's libraries are 90 MB, which who reads no data does without

    lengths, data, end = sequences.lengths, plan.data, plan.template.tokenizer.eos_token_id
    path = folder / f"{name}.idx.parquet"
    if plan.compares:
        answers = Answers(sequences, sequences.spool.column("first", np.int32, sequences.rows))
        order, bounds = np.arange(2 * len(lengths), dtype=np.int32), np.arange(0, 2 * len(lengths) + 1, 2)
        sequences_file.write(path, answers, order, bounds, pad_to=None, pad_id=end)
        return {}
    if not data.packed:
        order, bounds = np.arange(len(lengths), dtype=np.int32), np.arange(len(lengths) + 1)
        sequences_file.write(path, sequences, order, bounds, pad_to=None, pad_id=end)
        return {}
    padded = packing.padded(lengths, plan.multiple)
    order, bounds = packing.assign(padded, data.seq_length, data.seed)
    sequences_file.write(path, sequences, order, bounds, pad_to=plan.multiple, pad_id=end)
    return {name: report.packing(lengths, padded, bounds, data.seq_length, plan.multiple)}


def _write_lines(path: Path, sequences: Sequences) -> np.ndarray:
    """Write lines of JSON. Returns where the lines end."""
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
        some = np.arange(start, min(start + BATCH, len(sequences.rows)))
        yield sequences.tokens(some)[0], sequences.lengths[some]


def _check_splits(split: np.ndarray, plan: Plan) -> None:
    counts = np.bincount(split, minlength=len(SPLITS))
    if not counts.sum():
        raise Fault("data: no row is left; the reasons: data.bad_rows and data.too_long, or the source itself")
    if any(given is not None for given in plan.splits):
        return
    data = plan.data
    for name, share, count in zip(SPLITS, (1.0, data.validation, data.test), counts, strict=True):
        if share and not count:
            raise Fault(
                f"data.{name}: no row of {counts.sum()} falls to {name}; take more rows or a larger share"
                if name != "training"
                else f"data: none of the {counts.sum()} rows falls to training; take more rows, or smaller other shares"
            )


def _report(
    found: dict[str, Any],
    plan: Plan,
    spool: Spool,
    done: Done,
    kept: np.ndarray,
    like: alike.Alike,
    copies: int,
) -> dict[str, Any]:
    facts = list(spool.facts())
    counts = {name: int((like.split == number).sum()) for number, name in enumerate(SPLITS)}
    dropped = report.merged(facts, "dropped")
    if copies:
        dropped["copy of an earlier row"] = {"count": copies, "samples": []}
    if found["dropped"]:
        dropped[f"like another row, in {alike.FILE}"] = {"count": found["dropped"], "samples": []}
    cut, tokens = sum(fact["cut"] for fact in facts), sum(fact["cut_tokens"] for fact in facts)
    total = sum(entry["tokens"] for entry in found["tokens"].values())
    result = {
        "rows": {"read": sum(done.rows), "kept": len(kept), "not_chosen": done.left - done.copies} | counts,
        "dropped": dropped,
        "tokens": found["tokens"],
        "truncated": {"rows": cut, "share": round(cut / len(kept), 6), "tokens_cut": tokens},
        **alike.counts(like, kept),
        **found["alike"],
        "learned_share": round(sum(entry["learned"] for entry in found["tokens"].values()) / total, 6),
        "anomalies": report.merged(facts, "anomalies"),
        "template": plan.template.record(),
        "example": _example(spool, kept, plan),
    }
    if plan.compares:
        result["compares"] = True
    if found["packing"]:
        result["packing"] = found["packing"]
    result["warnings"] = report.warnings(result)
    return result


def _example(spool: Spool, kept: np.ndarray, plan: Plan) -> dict[str, Any]:
    """The first row as the model reads it, and which of its characters are learned."""
    ids, learned = Sequences(spool, kept[:1], np.empty(0, np.int32)).tokens(np.arange(1))
    bounds = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    text, marks = "", []
    for start, end in itertools.pairwise(bounds):
        piece = plan.template.tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)
        if learned[start]:
            marks.append([len(text), len(text) + len(piece)])
        text += piece
    return {"text": text, "learned": marks}
