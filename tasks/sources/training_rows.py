"""Estimate of a run's training sequences before its data are prepared: what a plan of epochs needs.

    sequences(run, made) -> (count, what was assumed)      None where nothing is known: sources on the Hub or in S3
    asked(run, made) -> count                              rows that the reference of a training is asked of
    empty(data) -> why                                     the first source on this host without a row; "" for none

Rows are counted in the first megabytes of each file and scaled to its size; no row is read. None is taken as too long,
broken or a duplicate. Packed sequences and texts for pretraining are filled with a token for every four bytes.
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
LINES = (".jsonl", ".ndjson", *HEADED)  # a row a line, as far as cells hold no line ends
TICKETS = 1600  # of tiny://tickets, 44 tokens each


def sequences(run: Run, made: dict[str, Any] | None = None) -> tuple[int | None, str]:
    """Number of training sequences, and in words where it comes from. `made` is the result of stage prepare."""
    if made:
        count = schedule.sequences(run, made["kind"], made["sequences"]["training"], made.get("tokens_training", 0))
        return count, f"{count:,} sequences, as prepared"
    found = _counted(run)
    if found is None:
        return None, "that are counted once the data are prepared"
    rows, size = found
    share = 1 - run.data.validation - run.data.test
    count, tokens = ceil(rows * share), size * share / BYTES
    words = f"about {_round(count):,} training rows, by the size of the files"
    if run.data.packed or any(part.shape == "text" for part in run.data.parts):
        count = max(1, ceil(tokens / run.data.seq_length))
        words = f"about {_round(count):,} sequences of {words}"
    return max(1, count), words


def asked(run: Run, made: dict[str, Any] | None = None) -> int | None:
    """Number of rows of training and validation together; None where nothing is known."""
    if made:
        return sum(made["rows"].get(split, 0) for split in ("training", "validation"))
    found = _counted(run)
    return None if found is None else ceil(found[0] * (1 - run.data.test))


def empty(data: Data) -> str:
    """The first source on this host without a row, as a reason; "" if each has one, or may have one."""
    for number, part in enumerate(data.parts):
        key = f"data.mixture[{number}].source" if data.mixture else "data.source"
        try:
            is_local = part.source and row_sources.kind(part.source, key) == "local"
            files = row_sources.files(part.source, key) if part.source and is_local else []
        except Fault:  # the stage reports a source that is not there
            continue
        if files and not any(map(_may_have_rows, files)):
            return f"{key}: {part.source}: no row in {files[0] if len(files) == 1 else f'its {len(files)} files'}"
    return ""


def _may_have_rows(file: Path) -> bool:
    counted = _of_file(file)
    headers = row_files.format_of(file.name) in HEADED
    return counted[0] > headers if counted else file.stat().st_size > 0


def _counted(run: Run) -> tuple[float, float] | None:
    """Rows that a run takes, and their bytes; None where they cannot be counted from here."""
    try:
        found = _rows(run)
    except (Fault, OSError):
        found = None
    if found is None or run.data.rows is None or not found[0]:
        return found
    rows, size = found
    return min(rows, run.data.rows), size * min(1, run.data.rows / rows)


def _rows(run: Run) -> tuple[int, float] | None:
    """Rows and bytes of all sources; None where one of them cannot be counted from here, or weights choose of them."""
    if len(run.data.parts) != 1 or not (source := run.data.parts[0].source):
        return None
    kind = row_sources.kind(source, "data.source")
    if kind == "tiny":
        return TICKETS, TICKETS * 44 * BYTES
    files = row_sources.files(source, "data.source") if kind == "local" else []
    counted = [_of_file(file) for file in files]
    if not counted or None in counted:
        return None
    found = [one for one in counted if one]
    return sum(rows for rows, _ in found), sum(size for _, size in found)


def _of_file(file: Path) -> tuple[int, int] | None:
    if row_files.compression(file.name) or row_files.format_of(file.name) not in LINES:
        return None
    size = file.stat().st_size
    with regular_files.open_regular(file) as opened:
        head = opened.read(SAMPLE)
    lines = sum(1 for line in head.splitlines() if line.strip())
    return (lines if size <= SAMPLE else round(lines * size / len(head))), size


def _round(count: int) -> int:
    """Two digits of a number, as an estimate has no more."""
    step = 10 ** max(0, len(str(count)) - 2)
    return round(count / step) * step
