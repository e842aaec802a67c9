"""Rows of a source, cut into numbered chunks: files, a data set on the Hub, or synthetic rows.

An existing file, folder or pattern (data/*.jsonl.gz) takes precedence over a data set on the Hub of that name.
conf/schema/row_files.py decides which files of a folder are read. Patterns take all files that they match.

The chunks are the same each time if the source is unchanged, so a caller may skip those it has finished.
"""

# pyright: reportAttributeAccessIssue=false

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conf.schema import row_files
from conf.schema.data import Part
from contract import indexed_files
from contract.faults import Fault, named
from trainer.data.made_texts import stories
from trainer.data.read import formats
from trainer.data.read.lines import Piece
from trainer.data.rows import Bad, Row, Rows
from trainer.data.tickets import pairs, tickets, with_mistakes, with_worse

TINY, TICKETS, TICKET_ROWS = "tiny://", "tiny://tickets", 1600
TEXTS, TEXT_ROWS = "tiny://texts", 2000
MISTAKEN = "tiny://mistaken-tickets"  # most rows have the next team instead of the right team
RANKED = "tiny://ranked-tickets"  # each row has the right team and a wrong team
SYNTHETIC = (TICKETS, MISTAKEN, RANKED, TEXTS)
FIRST = 20  # rows from which columns are inferred


@dataclass(frozen=True)
class Chunk:
    number: int  # within its part
    part: int
    size: int  # bytes of the source; 0 = unknown
    load: Callable[[], Rows]


def chunks(part: Part, number: int, done: Callable[[int], bool]) -> Iterator[Chunk]:
    """Yield all chunks of a source. Finished chunks have no rows."""
    source = _source(part)
    if is_local(source):
        pieces = _of_files(files(source))
    elif source.startswith(TINY):
        pieces = iter([(0, partial(_synthetic, source))])
    else:
        from trainer.data.read import hub

        pieces = hub.pieces(part, done)
    before = 0
    for count, (position, load) in enumerate(pieces):
        yield Chunk(count, number, position - before, _left_out if done(count) else load)
        before = position


def total(part: Part) -> int:
    """Return the bytes of all chunks; 0 = unknown."""
    source = _source(part)
    return sum(path.stat().st_size for path in files(source)) if is_local(source) else 0


def first(part: Part) -> tuple[list[Row], str]:
    """Return the first usable rows, and the place of the first one."""
    refused = ""
    for chunk in chunks(part, 0, lambda number: False):
        rows = chunk.load()
        good = [(at, row) for at, row in enumerate(rows.values) if not isinstance(row, Bad)]
        if good:
            return [row for _, row in good[:FIRST]], rows.place(good[0][0])
        if rows.values and not refused:
            bad = rows.values[0]
            refused = f": none of its rows can be read; {rows.place(0)}: {bad.reason}: {bad.shown}"
    raise Fault(f"data.source: {part.source}{refused or ': has no rows'}")


def is_local(source: str) -> bool:
    """Whether the source is files: existing files, or a name that only a file can have."""
    if "://" in source:
        return False
    named_like_a_file = source.startswith(("/", "./", "../", "~")) or glob.has_magic(source)
    return (
        named_like_a_file
        or bool(row_files.format_of(source))
        or any(Path(source + ending).exists() for ending in ("", indexed_files.BIN, indexed_files.IDX))
    )


def are_indexed(part: Part) -> bool:
    """Whether a source is Megatron's .bin/.idx: tokens, not rows."""
    source = part.source or ""
    return is_local(source) and indexed_files.are(files(source))


def files(source: str) -> list[Path]:
    with named("data.source"):
        return row_files.files(source)


def _source(part: Part) -> str:
    source = part.source or ""
    if source.startswith("s3://"):
        raise Fault(
            f"data.source: {source}: only the flow fetches from s3:// (python -m flows.finetune); use a file here"
        )
    if source.startswith(TINY) and source not in SYNTHETIC:
        raise Fault(f"data.source: {source}: no such data; there is {', '.join(SYNTHETIC[:-1])} and {SYNTHETIC[-1]}")
    if not source or "://" in source.removeprefix(TINY):
        raise Fault(f"data.source: {source or 'none'}: not a file, a folder, a data set on the Hub or {TICKETS}")
    return source


def _of_files(paths: list[Path]) -> Iterator[Piece]:
    """Yield pieces of files. The last piece of a file includes the rest of its bytes, such as a table's footer."""
    before, last = 0, None
    for path in paths:
        size = path.stat().st_size
        for position, load in formats.pieces(path):
            if last:
                yield last
            last = before + min(position, size), load
        before += size
        if last:
            last = before, last[1]
    if last:
        yield last


def _synthetic(source: str) -> Rows:
    """Return generated rows."""
    if source == TEXTS:
        rows = stories(TEXT_ROWS, seed=0)
    elif source == RANKED:
        rows = with_worse(tickets(TICKET_ROWS, seed=0), seed=0)
    else:
        teams = tickets(TICKET_ROWS, seed=0)
        rows = pairs(with_mistakes(teams, seed=0) if source == MISTAKEN else teams)
    return Rows([*rows], f"{source} row ", range(1, len(rows) + 1))


def _left_out() -> Rows:
    raise AssertionError("a finished chunk is not loaded again")
