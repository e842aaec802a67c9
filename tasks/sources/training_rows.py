"""Estimate of a run's training sequences before its data are prepared, for the plan of a run with epochs.

    sequences(run, prepared) -> (count, origin)     None if it is unknown: sources on the Hub or in S3
    asked(run, prepared) -> count                   rows that the reference model scores
    held_out(run, prepared) -> count                rows of the test split
    empty(data) -> reason                           the first source on this host without a row; "" for none

The estimate counts the lines in the first megabytes of each file and scales them to its size; it parses no row. It
assumes that no row is too long, broken or a duplicate, and that four bytes of text are one token.
"""

from math import ceil
from pathlib import Path
from typing import Any

from conf.rules import schedule
from conf.schema import row_files
from conf.schema.data import Data
from conf.schema.run import Run
from contract import regular_files
from contract.faults import Fault
from tasks.sources import row_sources

SAMPLE = 4 << 20  # bytes of each file
BYTES = 4  # of a token, in English text and in JSON alike
HEADED = (".csv", ".tsv")  # the first line names columns
LINES = (".jsonl", ".ndjson", *HEADED)  # one row per line, except for cells with line breaks
TICKETS = 1600  # of tiny://tickets, 44 tokens each


def sequences(run: Run, prepared: dict[str, Any] | None = None) -> tuple[int | None, str]:
    """Number of training sequences, and a phrase on its origin. `prepared` is the result of stage prepare."""
    if prepared:
        count = schedule.sequences(
            run, prepared["kind"], prepared["sequences"]["training"], prepared.get("tokens_training", 0)
        )
        return count, f"{count:,} sequences, as prepared"
    counted = _counted(run)
    if counted is None:
        return None, "that are counted once the data are prepared"
    rows, size = counted
    share = 1 - run.data.validation - run.data.test
    count, tokens = ceil(rows * share), size * share / BYTES
    words = f"about {_round(count):,} training rows, by the size of the files"
    if run.data.packed or any(part.shape == "text" for part in run.data.parts):
        count = max(1, ceil(tokens / run.data.seq_length))
        words = f"about {_round(count):,} sequences of {words}"
    return max(1, count), words


def asked(run: Run, prepared: dict[str, Any] | None = None) -> int | None:
    """Number of rows of training and validation together; None if it is unknown."""
    if prepared:
        return sum(prepared["rows"].get(split, 0) for split in ("training", "validation"))
    counted = _counted(run)
    return None if counted is None else ceil(counted[0] * (1 - run.data.test))


def held_out(run: Run, prepared: dict[str, Any] | None = None) -> int | None:
    """Number of rows of the test split; None if it is unknown, or for texts, which are cut into windows."""
    if prepared:
        return None if prepared["kind"] == "text" else prepared["rows"].get("test", 0)
    counted = None if any(part.shape == "text" for part in run.data.parts) else _counted(run)
    return None if counted is None else round(counted[0] * run.data.test)


def empty(data: Data) -> str:
    """Message on the first source on this host without a row; "" if each has or may have one."""
    for number, part in enumerate(data.parts):
        key = f"data.mixture[{number}].source" if data.mixture else "data.source"
        try:
            is_local = part.source and row_sources.kind(part.source, key) == "local"
            files = row_sources.files(part.source, key) if part.source and is_local else []
        except Fault:  # the stage reports a missing source
            continue
        if files and not any(map(_may_have_rows, files)):
            return f"{key}: {part.source}: no row in {files[0] if len(files) == 1 else f'its {len(files)} files'}"
    return ""


def _may_have_rows(file: Path) -> bool:
    counted = _of_file(file)
    headers = row_files.format_of(file.name) in HEADED
    return counted[0] > headers if counted else file.stat().st_size > 0


def _counted(run: Run) -> tuple[float, float] | None:
    """Rows that a run uses, and their bytes; None if this host cannot count them."""
    try:
        counted = _rows(run)
    except (Fault, OSError):
        counted = None
    if counted is None or run.data.rows is None or not counted[0]:
        return counted
    rows, size = counted
    return min(rows, run.data.rows), size * min(1, run.data.rows / rows)


def _rows(run: Run) -> tuple[int, float] | None:
    """Rows and bytes of all sources; None if this host cannot count one of them, or the data are a mixture."""
    if len(run.data.parts) != 1 or not (source := run.data.parts[0].source):
        return None
    kind = row_sources.kind(source, "data.source")
    if kind == "tiny":
        return TICKETS, TICKETS * 44 * BYTES
    files = row_sources.files(source, "data.source") if kind == "local" else []
    counted = [_of_file(file) for file in files]
    known = [pair for pair in counted if pair]
    if not known or len(known) < len(counted):
        return None
    return sum(rows for rows, _ in known), sum(size for _, size in known)


def _of_file(file: Path) -> tuple[int, int] | None:
    if row_files.compression(file.name) or row_files.format_of(file.name) not in LINES:
        return None
    size = file.stat().st_size
    with regular_files.open_regular(file) as opened:
        head = opened.read(SAMPLE)
    lines = sum(1 for line in head.splitlines() if line.strip())
    return (lines if size <= SAMPLE else round(lines * size / len(head))), size


def _round(count: int) -> int:
    """Round to two digits, as an estimate is not more precise."""
    step = 10 ** max(0, len(str(count)) - 2)
    return round(count / step) * step
