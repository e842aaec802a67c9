"""Files of rows, by the endings of their names, each cut into pieces of a few megabytes.

    .jsonl .ndjson          a JSON object per line
    .json                   the same, or one array of objects, or one object that contains one list of objects
    .csv .tsv               a header, then a row of cells per record
    .parquet                Parquet
    .arrow .feather         Arrow, file or stream
    .txt                    a document per line, in the column "text"

and each of them with .gz, .bz2, .xz, .zst or .lz4 after it. Cuts depend only on a file's bytes.
"""

from collections.abc import Iterator
from pathlib import Path

from conf.schema.row_files import ENDINGS, TEXT, format_of
from contract.faults import Fault
from trainer.data.read import cells, json_array, lines

CHUNK = 2 * 2**20  # approximate bytes of a piece, which take 0.7 s to process
TABLES = (".parquet", ".arrow", ".feather")


def pieces(path: Path, size: int = 0) -> Iterator[lines.Piece]:
    """Yield the pieces of a file in order: the bytes of the file up to a piece's end, and a function that loads its
    rows.
    """
    kind, size = format_of(path), size or CHUNK
    if kind in TABLES:
        from trainer.data.read import tables  # pyarrow takes 50 MB, which lines of text do not need

        return tables.parquet(path, size) if kind == ".parquet" else tables.arrow(path, size)
    if kind in (".csv", ".tsv"):
        return cells.pieces(path, size, "\t" if kind == ".tsv" else ",")
    if kind == ".json" and json_array.is_document(path):
        return json_array.pieces(path, size)
    if kind:
        return lines.pieces(path, size, lines.text if kind == TEXT else lines.json_object)
    raise Fault(f"data.source: {path}: ends in none of {ENDINGS}")
