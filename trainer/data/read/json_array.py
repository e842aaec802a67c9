"""Reader of one JSON document that holds all rows: an array of objects, or an object with one list of objects in it.

    [{"input": ...}, ...]        {"version": 1, "data": [{"input": ...}, ...]}

Only brackets, commas and strings are examined here, a block at a time, so files of any size work. A chunk has the bytes
of its rows, and where each begins and ends. Its loader parses them; invalid JSON there is one bad row, not a bad file.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contract.faults import Fault
from trainer.data.read.compressed import reading_text
from trainer.data.read.lines import BLANK, LONGEST, Piece, json_object
from trainer.data.rows import Rows

# A string and its closing quote (absent at the block's end), or a mark. Possessive: no backtracking in long strings.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)|[][{},]', re.DOTALL)
QUOTE = b'"'[0]
BRACKET, OPENING, CLOSING, ENDING = b"["[0], b"[{", b"]}", b",]}"
LOOK = 2**24  # bytes of a first line examined to distinguish lines from a document


def is_document(path: Path) -> bool:
    """Whether a .json file is one document. Otherwise it has one row per line.

    A single line that is an object with one list of objects is a document.
    """
    with reading_text(path) as (stream, _):
        line = b"\n"
        while line.endswith(b"\n") and not line.strip(BLANK):
            line = stream.readline(LOOK)
        begin = line.strip(BLANK)
        if begin.startswith(b"["):
            return True
        if not begin.startswith(b"{"):
            return False
        if begin.endswith((b"{", b"[", b",", b":")) or not (line.endswith(b"\n") or len(line) < LOOK):
            return True  # continues in the next line
        if any(more.strip(BLANK) for more in iter(partial(stream.read, 2**10), b"")):
            return False
    row = json_object(begin)
    return isinstance(row, dict) and sum(map(_is_of_objects, row.values())) == 1


def _is_of_objects(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], dict)


def pieces(path: Path, size: int) -> Iterator[Piece]:
    with reading_text(path) as (stream, position):
        for line, blob, spans in _cut(_Window(stream, size), path):
            yield position(), partial(_load, path, line, blob, spans)


def _load(path: Path, first: int, blob: bytes, spans: list[tuple[int, int]]) -> Rows:
    counted = (0, 0)  # bytes, and lines in them: callers usually ask for places in order

    def place(row: int) -> str:
        nonlocal counted
        begin, end = spans[row]
        at = end - len(blob[begin:end].lstrip(BLANK))
        before, lines = counted if counted[0] <= at else (0, 0)
        counted = at, lines + blob.count(b"\n", before, at)
        return f"{path}:{first + counted[1]}"

    return Rows([json_object(blob[begin:end].strip(BLANK)) for begin, end in spans], place)


class _Window:
    """The part of a document that is in memory."""

    def __init__(self, stream: io.BufferedReader, size: int) -> None:
        self.stream, self.size = stream, size
        self.buffer, self.at = b"", 0  # at: end of the last mark read
        self.line = 1  # of the start of the buffer

    def marks(self) -> Iterator[tuple[int, int]]:
        """Yield every bracket and comma outside of strings, and the position after it, until the buffer ends."""
        for match in TOKEN.finditer(self.buffer, self.at):
            self.at = match.end()
            mark = self.buffer[match.start()]
            if mark != QUOTE:
                yield mark, self.at
            elif match[1] != b'"':
                self.at = match.start()
                return
        self.at = len(self.buffer)

    def grow(self) -> bool:
        block = self.stream.read(max(self.size, len(self.buffer)))
        self.buffer += block
        return bool(block)

    def drop(self, end: int) -> bytes:
        """Remove the buffer's first bytes and return them."""
        removed, self.buffer = self.buffer[:end], self.buffer[end:]
        self.line += removed.count(b"\n")
        self.at -= end
        return removed


@dataclass
class _Place:
    """Place in a document, updated by its marks."""

    depth: int = 0
    rows_at: int = 0  # depth within the list of rows; 0 = not in it
    begin: int = 0  # of the row, in the buffer
    lists: int = 0  # of rows, so far
    fresh: bool = False  # no row of this list has ended yet
    closed: bool = False
    array: bool = False  # the document is an array

    def take(self, mark: int, end: int, buffer: bytes) -> tuple[int, int] | None:
        """Return the row that ends with this mark, if any."""
        row = None
        if self.rows_at == self.depth and self.depth and mark in ENDING:
            row = self._row(buffer, end - 1, mark)
            self.begin = end
        if mark in OPENING:
            self.depth += 1
            # at depth 2 outside of a list: the document is an object, and this is one of its values
            if mark == BRACKET and not self.rows_at and self.depth <= 2:
                self.rows_at, self.begin, self.fresh = self.depth, end, True
                self.array = self.depth == 1
        elif mark in CLOSING:
            if self.rows_at == self.depth:
                self.rows_at = 0
            self.depth -= 1
            self.closed = self.depth <= 0
        return row

    def _row(self, buffer: bytes, end: int, mark: int) -> tuple[int, int] | None:
        content = buffer[self.begin : end].strip(BLANK)
        if not content and mark in CLOSING:  # an empty list, or a comma after the last row
            return None
        if self.fresh and self.rows_at == 2 and not content.startswith(b"{"):
            self.rows_at = 0  # a list of something else
            return None
        self.lists += self.fresh
        self.fresh = False
        return self.begin, end


def _cut(window: _Window, path: Path) -> Iterator[tuple[int, bytes, list[tuple[int, int]]]]:
    """Yield bytes of whole rows: the line of their start, the bytes, and where each row begins and ends."""
    place = _Place()
    while window.grow():
        spans = []
        for mark, end in () if place.closed else window.marks():
            if row := place.take(mark, end, window.buffer):
                spans.append(row)
            if place.lists > 1:
                raise Fault(f"{path}: several lists of objects in one object; rows must be in one list")
            if place.closed:
                break
        if spans:
            cut, line = spans[-1][1], window.line
            place.begin -= cut
            yield line, window.drop(cut), spans
        _check(place, window, path)
        if not place.rows_at:
            window.drop(window.at)
    if place.depth:
        location = f"the row at line {_line(place, window)}" if place.rows_at else f"line {_line(place, window)}"
        raise Fault(f"{path}: ends within {location}: brackets or a quote are never closed")
    if not place.lists and not place.array:
        raise Fault(f"{path}: no list of objects in it; rows are objects in an array, or one per line")


def _check(place: _Place, window: _Window, path: Path) -> None:
    if place.closed and window.buffer[window.at :].strip(BLANK):
        raise Fault(f"{path}:{_line(place, window)}: more after the end of the JSON document")
    if place.rows_at and len(window.buffer) - place.begin > LONGEST:
        raise Fault(f"{path}:{_line(place, window)}: a row of more than {LONGEST >> 20} MiB; is a quote missing?")


def _line(place: _Place, window: _Window) -> int:
    """Return the line of the row, or of the text after the last mark."""
    begin = place.begin if place.rows_at else window.at
    rest = window.buffer[begin:]
    return window.line + window.buffer.count(b"\n", 0, begin + len(rest) - len(rest.lstrip(BLANK)))
