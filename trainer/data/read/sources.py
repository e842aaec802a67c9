"""Rows of a source, cut into numbered chunks: files, a data set on the Hub, or tickets made here.

A file, a folder or a pattern (data/*.jsonl.gz) that is there counts before a data set on the Hub of that name.
conf/schema/row_files.py says which files of a folder are read. Patterns take all files that they match.

Chunks are the same each time as long as the source is: a caller that has done some of them may leave those out.
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
from contract.faults import Fault
from trainer.data.made_texts import texts
from trainer.data.read import formats
from trainer.data.read.lines import Piece
from trainer.data.rows import Bad, Row, Rows
from trainer.data.tickets import tickets, with_mistakes, with_worse

TINY, TICKETS, TICKET_ROWS = "tiny://", "tiny://tickets", 1600
TEXTS, TEXT_ROWS = "tiny://texts", 2000
MISTAKEN = "tiny://mistaken-tickets"  # most have the next team in the place of the right one
RANKED = "tiny://ranked-tickets"  # with a wrong team beside the right one
MADE = (TICKETS, MISTAKEN, RANKED, TEXTS)
FIRST = 20  # rows that tell what a source holds


@dataclass(frozen=True)
class Chunk:
    number: int  # within its part
    part: int
    size: int  # bytes of the source that it stands for; 0 = unknown
    load: Callable[[], Rows]


def chunks(part: Part, number: int, done: Callable[[int], bool], commit: str | None = None) -> Iterator[Chunk]:
    """All chunks of a source. Those that are done come without their rows."""
    source = _source(part)
    if is_local(source):
        found = _of_files(files(source))
    elif source.startswith(TINY):
        found = iter([(0, partial(_made, source))])
    else:
        from trainer.data.read import hub

        found = hub.pieces(part, commit, done)
    before = 0
    for count, (position, load) in enumerate(found):
        yield Chunk(count, number, position - before, _left_out if done(count) else load)
        before = position


def total(part: Part) -> int:
    """Bytes of all chunks; 0 = unknown."""
    source = _source(part)
    return sum(path.stat().st_size for path in files(source)) if is_local(source) else 0


def columns(part: Part, commit: str | None = None) -> tuple[list[str], list[Row], str]:
    """Names of columns in the order of their appearance, the first rows, and the place of the first of them."""
    refused = ""
    for chunk in chunks(part, 0, lambda number: False, commit):
        rows = chunk.load()
        good = [at for at, row in enumerate(rows.values) if not isinstance(row, Bad)]
        if good:
            first = [row for row in (rows.values[at] for at in good[:FIRST]) if not isinstance(row, Bad)]
            return list(dict.fromkeys(name for row in first for name in row)), first, rows.place(good[0])
        if rows.values and not refused:
            bad = rows.values[0]
            refused = f": of its rows none can be read; {rows.place(0)}: {bad.reason}: {bad.shown}"
    raise Fault(f"data.source: {part.source}{refused or ': has no rows'}")


def is_local(source: str) -> bool:
    """Whether these are files: files that are there, or a text that can be nothing else."""
    if "://" in source:
        return False
    named_as_one = source.startswith(("/", "./", "../", "~")) or glob.has_magic(source)
    return named_as_one or bool(row_files.format_of(source)) or Path(source).exists() or bool(_indexed(Path(source)))


def are_indexed(part: Part) -> bool:
    """Whether a source is Megatron's .bin/.idx: tokens, not rows."""
    source = part.source or ""
    return is_local(source) and indexed_files.are(files(source))


def files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if indexed_files.is_prefix(path):
        return _indexed(path)
    if path.is_dir():
        try:
            found = row_files.inside(path)
        except Fault as fault:
            raise Fault(f"data.source: {fault}") from None
        found = (row_files.only_texts(found) and _indexed(path)) or found
        if not found:
            raise Fault(f"data.source: {source}: no file in this folder ends in one of {row_files.ENDINGS}")
        return found
    if path.exists():
        if not path.is_file():
            raise Fault(f"data.source: {source}: neither a file nor a folder")
        if found := _indexed(path):
            return found
        if not row_files.format_of(path):
            raise Fault(f"data.source: {source}: ends in none of {row_files.ENDINGS}")
        return [path]
    if found := _indexed(path):
        return found
    if not glob.has_magic(source):
        raise Fault(f"data.source: {source}: no such file or folder")
    matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    found = [match for match in matches if row_files.format_of(match) and match.is_file()]
    found = found or indexed_files.both(matches)
    if not found:
        said = f"matches no file that ends in one of {row_files.ENDINGS}" if matches else "matches no file"
        raise Fault(f"data.source: {source}: {said}")
    return found


def _indexed(path: Path) -> list[Path]:
    try:
        return indexed_files.of(path)
    except Fault as fault:
        raise Fault(f"data.source: {fault}") from None


def _source(part: Part) -> str:
    source = part.source or ""
    if source.startswith("s3://"):
        raise Fault(
            f"data.source: {source}: the flow fetches what lies on s3:// (python -m flows.finetune); here, a file"
        )
    if source.startswith(TINY) and source not in MADE:
        raise Fault(f"data.source: {source}: no such data; there is {', '.join(MADE[:-1])} and {MADE[-1]}")
    if not source or "://" in source.removeprefix(TINY):
        raise Fault(f"data.source: {source or 'none'}: not a file, a folder, a data set on the Hub or {TICKETS}")
    return source


def _of_files(paths: list[Path]) -> Iterator[Piece]:
    """Pieces of files. The last piece of a file counts for all that is left of it, such as the footer of a table."""
    before, held = 0, None
    for path in paths:
        size = path.stat().st_size
        for position, load in formats.pieces(path):
            if held:
                yield held
            held = before + min(position, size), load
        before += size
        if held:
            held = before, held[1]
    if held:
        yield held


def _made(source: str) -> Rows:
    """Rows that the project makes itself."""
    if source == TEXTS:
        rows = [{"text": text} for text in texts(TEXT_ROWS, seed=0)]
    elif source == RANKED:
        rows = with_worse(tickets(TICKET_ROWS, seed=0), seed=0)
    else:
        found = tickets(TICKET_ROWS, seed=0)
        found = with_mistakes(found, seed=0) if source == MISTAKEN else found
        rows = [{"input": ticket, "output": team} for ticket, team in found.items()]
    return Rows([*rows], lambda row: f"{source} row {row + 1}")


def _left_out() -> Rows:
    raise AssertionError("a chunk that is done is not loaded again")
