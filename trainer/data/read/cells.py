"""Reader of CSV and TSV: a header, then a row of cells per record, all text; quoted cells may span several lines.

The file is read sequentially, because only a read from its start shows which line ends are within quotes. Commas or
tabs separate cells, double quotes quote them.
"""

import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from contract.faults import Fault, named
from trainer.data.read.compressed import reading_text
from trainer.data.read.lines import LONGEST, SURROGATE, Piece, bounded_line
from trainer.data.rows import Bad, Row, Rows, show


def pieces(path: Path, size: int, delimiter: str) -> Iterator[Piece]:
    csv.field_size_limit(LONGEST)
    with reading_text(path) as (stream, position):
        held = 0  # bytes since the last cut

        def lines() -> Iterator[str]:
            nonlocal held
            while line := bounded_line(stream, path):
                held += len(line)
                yield line.decode(errors="surrogateescape")

        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        header = _header(path, reader, delimiter)
        held = 0
        rows, numbers = [], []
        for number, row in _records(path, reader, header):
            if row is not None:
                rows.append(row)
                numbers.append(number)
            if held >= size:
                yield position(), partial(Rows, rows, f"{path}:", numbers)
                rows, numbers, held = [], [], 0
        if held:
            yield position(), partial(Rows, rows, f"{path}:", numbers)


def _records(path: Path, reader, header: list[str]) -> Iterator[tuple[int, Row | Bad | None]]:
    """Yield the first line and the row of each record; None for a blank line.

    A record that is not CSV is one bad row, unless it swallows the rest of the file.
    """
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end" in str(error) or "field larger" in str(error):
                raise Fault(f"{path}:{number}: a quote in this row is never closed") from None
            yield number, Bad("not CSV", shown=str(error))
        else:
            yield number, _row(cells, header) if cells else None


def _row(cells: list[str], header: list[str]) -> Row | Bad:
    if len(cells) != len(header):
        return Bad("wrong number of cells", shown=f"{len(cells)} cells for {len(header)} columns")
    row = dict(zip(header, cells, strict=True))
    for name, cell in row.items():
        if not cell.isascii() and (surrogate := SURROGATE.search(cell)):
            return Bad("not UTF-8", name, f"at byte {len(cell[: surrogate.start()].encode())}")
    return row


def _header(path: Path, reader: Iterator[list[str]], delimiter: str) -> list[str]:
    with named(f"{path}:1: header", csv.Error):
        names = next((cells for cells in reader if cells), [])
    if any(map(SURROGATE.search, names)):
        raise Fault(f"{path}:1: header: not UTF-8")
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise Fault(f"{path}:1: header: column {show(repeated)} occurs twice")
    if len(names) == 1 and (separator := next((mark for mark in ",;\t|" if mark in names[0]), None)):
        raise Fault(
            f"{path}:1: header: {show(names[0])}: cells separated by {show(separator)}, not by {show(delimiter)}"
        )
    return names
