"""Reader of CSV and TSV: a header, then a row of cells per record, all text; quoted cells may span several lines.

The file is read sequentially here, because only a read from its start shows which line ends are within quotes. A chunk
carries its records as bytes, and its loader parses them again. Commas or tabs separate cells, double quotes quote them.
"""

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from contract.faults import Fault
from trainer.data.read.compressed import reading_text
from trainer.data.read.lines import LONGEST, SURROGATE, Piece, bounded_line
from trainer.data.rows import Bad, Row, Rows, show


def pieces(path: Path, size: int, delimiter: str) -> Iterator[Piece]:
    with reading_text(path) as (stream, position):
        lines_held: list[bytes] = []
        size_held = 0

        def lines() -> Iterator[str]:
            nonlocal size_held
            while line := bounded_line(stream, path):
                lines_held.append(line)
                size_held += len(line)
                yield line.decode(errors="surrogateescape")

        reader = _reader(lines(), delimiter)
        header = _header(path, reader, delimiter)
        first = reader.line_num + 1
        lines_held.clear()
        size_held = 0
        while _next(reader, path):
            if size_held >= size:
                yield position(), partial(_load, path, first, b"".join(lines_held), header, delimiter)
                first = reader.line_num + 1
                lines_held.clear()
                size_held = 0
        if lines_held:
            yield position(), partial(_load, path, first, b"".join(lines_held), header, delimiter)


def _load(path: Path, first: int, blob: bytes, header: tuple[str, ...], delimiter: str) -> Rows:
    try:
        text, damaged = blob.decode(), False
    except UnicodeDecodeError:
        text, damaged = blob.decode(errors="surrogateescape"), True
    reader = _reader(io.StringIO(text, newline="\n"), delimiter)
    values: list[Row | Bad] = []
    numbers: list[int] = []
    while True:
        line = first + reader.line_num
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            cells = Bad("not CSV", shown=str(error))
        if not cells:  # a blank line
            continue
        values.append(cells if isinstance(cells, Bad) else _row(cells, header, damaged))
        numbers.append(line)
    return Rows(values, lambda row: f"{path}:{numbers[row]}")


def _row(cells: list[str], header: tuple[str, ...], damaged: bool) -> Row | Bad:
    if len(cells) != len(header):
        return Bad("wrong number of cells", shown=f"{len(cells)} cells for {len(header)} columns")
    if damaged:
        for name, cell in zip(header, cells, strict=True):
            if surrogate := SURROGATE.search(cell):
                return Bad("not UTF-8", name, f"at byte {len(cell[: surrogate.start()].encode())}")
    return dict(zip(header, cells, strict=True))


def _header(path: Path, reader: Iterator[list[str]], delimiter: str) -> tuple[str, ...]:
    try:
        names = next((cells for cells in reader if cells), [])
    except csv.Error as error:
        raise Fault(f"{path}:1: header: {error}") from None
    if any(map(SURROGATE.search, names)):
        raise Fault(f"{path}:1: header: not UTF-8")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise Fault(f"{path}:1: header: column {show(repeated)} occurs twice")
    if len(names) == 1 and (separator := next((mark for mark in ",;\t|" if mark in names[0]), None)):
        raise Fault(
            f"{path}:1: header: {show(names[0])}: cells separated by {show(separator)}, not by {show(delimiter)}"
        )
    return tuple(names)


def _next(reader, path: Path) -> bool:
    """Skip one record. A bad record is reported when it is loaded, unless it swallows the rest of the file."""
    number = reader.line_num + 1
    try:
        next(reader)
    except StopIteration:
        return False
    except csv.Error as error:
        if "unexpected end" in str(error) or "field larger" in str(error):
            raise Fault(f"{path}:{number}: a quote in this row is never closed") from None
    return True


def _reader(lines, delimiter: str):
    csv.field_size_limit(LONGEST)
    return csv.reader(lines, delimiter=delimiter, strict=True)
