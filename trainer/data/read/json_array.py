"""Reader of one JSON document that holds all rows: an array of objects, or an object with one list of objects in it.

    [{"input": ...}, ...]        {"version": 1, "data": [{"input": ...}, ...]}

Only brackets, commas and strings are examined here, a block at a time, so files of any size work. A chunk has the bytes
of its rows, and the beginning and end of each row. Its loader parses the rows: invalid JSON in a row makes only this
row bad, not the whole file.
"""

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
Span = tuple[int, int]  # begin and end of a row in the buffer
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
    lists = [value for value in row.values() if isinstance(value, list)] if isinstance(row, dict) else []
    return sum(isinstance(value[0], dict) for value in lists if value) == 1


def pieces(path: Path, size: int) -> Iterator[Piece]:
    with reading_text(path) as (stream, position):
        document = _Document(path)
        while block := stream.read(max(size, len(document.buffer))):
            document.buffer += block
            line, spans = document.line, document.rows()
            if spans:
                yield position(), partial(_load, path, line, document.drop(spans[-1][1]), spans)
            document.check()
        document.check_end()


def _load(path: Path, line: int, blob: bytes, spans: list[Span]) -> Rows:
    values, numbers, at = [], [], 0
    for begin, end in spans:
        start = end - len(blob[begin:end].lstrip(BLANK))
        line += blob.count(b"\n", at, start)
        at = start
        values.append(json_object(blob[begin:end].strip(BLANK)))
        numbers.append(line)
    return Rows(values, f"{path}:", numbers)


@dataclass
class _Document:
    """The part of a document that is in memory, and the reading position, which each mark updates."""

    path: Path
    buffer: bytes = b""
    at: int = 0  # end of the last mark read
    line: int = 1  # of the start of the buffer
    depth: int = 0
    rows_at: int = 0  # depth within the list of rows; 0 = not in it
    begin: int = 0  # of the row, in the buffer
    lists: int = 0  # of rows, so far
    fresh: bool = False  # whether no row of this list has ended yet
    closed: bool = False
    array: bool = False  # whether the document is an array

    def rows(self) -> list[Span]:
        """Read brackets and commas outside of strings until the buffer ends. Return the rows that end there."""
        spans: list[Span] = []
        if self.closed:
            return spans
        for match in TOKEN.finditer(self.buffer, self.at):
            mark = self.buffer[match.start()]
            if mark == QUOTE and match[1] != b'"':
                self.at = match.start()  # the string continues after the buffer
                return spans
            self.at = match.end()
            if mark != QUOTE and (row := self._take(mark)):
                spans.append(row)
            if self.lists > 1:
                raise Fault(f"{self.path}: several lists of objects in one object; rows must be in one list")
            if self.closed:
                return spans
        self.at = len(self.buffer)
        return spans

    def drop(self, end: int) -> bytes:
        """Remove the buffer's first bytes and return them."""
        removed, self.buffer = self.buffer[:end], self.buffer[end:]
        self.line += removed.count(b"\n")
        self.at -= end
        self.begin -= end
        return removed

    def check(self) -> None:
        """Raise a Fault if the buffer cannot be part of a document. Drop text outside of the list of rows."""
        if self.closed and self.buffer[self.at :].strip(BLANK):
            raise Fault(f"{self.path}:{self._line()}: more after the end of the JSON document")
        if self.rows_at and len(self.buffer) - self.begin > LONGEST:
            raise Fault(f"{self.path}:{self._line()}: a row of more than {LONGEST >> 20} MiB; is a quote missing?")
        if not self.rows_at:
            self.drop(self.at)

    def check_end(self) -> None:
        if self.depth:
            location = f"the row at line {self._line()}" if self.rows_at else f"line {self._line()}"
            raise Fault(f"{self.path}: ends within {location}: brackets or a quote are never closed")
        if not self.lists and not self.array:
            raise Fault(f"{self.path}: no list of objects in it; rows are objects in an array, or one per line")

    def _line(self) -> int:
        """Return the line of the row, or of the text after the last mark."""
        begin = self.begin if self.rows_at else self.at
        rest = self.buffer[begin:]
        return self.line + self.buffer.count(b"\n", 0, begin + len(rest) - len(rest.lstrip(BLANK)))

    def _take(self, mark: int) -> Span | None:
        """Update the place by a mark. Return the row that ends with it, if any."""
        row = None
        if self.rows_at == self.depth and self.depth and mark in ENDING:
            row = self._row(self.at - 1, mark)
            self.begin = self.at
        if mark in OPENING:
            self.depth += 1
            # at depth 2 outside of a list: the document is an object, and this is one of its values
            if mark == BRACKET and not self.rows_at and self.depth <= 2:
                self.rows_at, self.begin, self.fresh = self.depth, self.at, True
                self.array = self.depth == 1
        elif mark in CLOSING:
            if self.rows_at == self.depth:
                self.rows_at = 0
            self.depth -= 1
            self.closed = self.depth <= 0
        return row

    def _row(self, end: int, mark: int) -> Span | None:
        content = self.buffer[self.begin : end].strip(BLANK)
        if not content and mark in CLOSING:  # an empty list, or a comma after the last row
            return None
        if self.fresh and self.rows_at == 2 and not content.startswith(b"{"):
            self.rows_at = 0  # a list of other values than objects
            return None
        self.lists += self.fresh
        self.fresh = False
        return self.begin, end
