"""Reader of Parquet and Arrow: rows as Python objects, a few megabytes at a time.

Files are read here, a batch at a time, and a chunk carries its batches in Arrow's stream format. A row group of Parquet
can be as large as the file and cannot be entered in the middle. A small one does not tell how large its rows are
either: a prompt that all rows share lies there once.

Arrow gives all objects of a list the same keys: those that an object of the source did not have are None, and are left
out. A column that is None stays. Bytes, times and decimals are left as Python has them. Not covered: encrypted Parquet.
"""

import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from conf.schema.row_files import compression
from contract.faults import Fault
from trainer.data.read.compressed import faults, reading
from trainer.data.read.lines import Piece
from trainer.data.rows import Bad, Row, Rows

ROWS = 20_000  # at most in a chunk
BATCH = 200  # rows of Parquet decoded at once
BUFFER = 2**20  # read ahead in each column, in place of the whole of it
MAGIC = b"ARROW1"


def parquet(path: Path, size: int) -> Iterator[Piece]:
    with _unpacked(path) as (file, unpacked), table_faults(path):
        table = pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        _require_names(path, table.schema_arrow)
        yield from _carried(path, _of_groups(table, path.stat().st_size / unpacked), size)


def arrow(path: Path, size: int) -> Iterator[Piece]:
    """Read both of Arrow's formats: the file is a stream behind a magic word, with an index at its end."""
    with table_faults(path):
        if compression(path):
            with reading(path) as (stream, position):
                if stream.peek(len(MAGIC)).startswith(MAGIC):
                    stream.read(8)
                yield from _carried(path, _of_stream(path, pa.ipc.open_stream(stream), position), size)
            return
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise Fault(f"{path}: empty; an Arrow file begins with its schema")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(mapped))
        if mapped[: len(MAGIC)] == MAGIC:
            if mapped[-len(MAGIC) :] != MAGIC:
                raise Fault(f"{path}: breaks off: the end of an Arrow file is missing")
            source.seek(8)
        batches = _of_stream(path, pa.ipc.open_stream(source), source.tell)
        for piece in _carried(path, batches, size):
            yield piece
            mapped.madvise(mmap.MADV_DONTNEED)  # pages that have been read are no memory of ours any more


def without_absent_keys(value: Any, within: bool = False) -> Any:
    """The value, where objects in lists lose the keys that are None."""
    if isinstance(value, list):
        return [without_absent_keys(inner, True) for inner in value]
    if isinstance(value, dict):
        inner = value.items()
        return {key: without_absent_keys(one, within) for key, one in inner if not (within and one is None)}
    return value


@contextmanager
def table_faults(path: Path) -> Iterator[None]:
    with faults(path):
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise Fault(f"{path}: {(str(error).splitlines() or ['cannot be read'])[0]}") from None


Span = tuple[pa.RecordBatch, int, int]  # a batch, and the bytes of the file before and after it


def _of_groups(table: pq.ParquetFile, share: float) -> Iterator[Span]:
    position = 0
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        length = sum(group.column(column).total_compressed_size for column in range(group.num_columns))
        done = 0
        for batch in table.iter_batches(BATCH, row_groups=[number], use_threads=False):
            before, done = done, done + batch.num_rows
            at = [int(share * (position + length * rows / group.num_rows)) for rows in (before, done)]
            yield batch, at[0], at[1]
        position += length


def _of_stream(path: Path, reader: pa.RecordBatchReader, position: Callable[[], int]) -> Iterator[Span]:
    _require_names(path, reader.schema)
    before = 0
    for batch in reader:
        yield batch, before, position()
        before = position()


def _carried(path: Path, spans: Iterable[Span], size: int) -> Iterator[Piece]:
    """Pieces cut at about this size, by the memory that rows take: in the file, equal values may lie once."""
    held, taken, rows = [], 0, 0
    first, position = 1, 0
    for batch, before, after in spans:
        step = max(1, min(ROWS, batch.num_rows * size // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, step):
            held.append(batch.slice(start, step))
            taken += held[-1].nbytes
            rows += held[-1].num_rows
            position = before + (after - before) * min(start + step, batch.num_rows) // batch.num_rows
            if taken >= size or rows >= ROWS:
                yield position, partial(_load, path, first, _packed(held))
                first += rows
                held, taken, rows = [], 0, 0
    if held:
        yield position, partial(_load, path, first, _packed(held))


def _packed(batches: list[pa.RecordBatch]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _load(path: Path, first: int, packed: bytes) -> Rows:
    values: list[Row | Bad] = []
    for batch in pa.ipc.open_stream(packed):
        try:
            found = batch.to_pylist(maps_as_pydicts="lossy")
        except (ValueError, OverflowError):
            values += [_row(batch, number) for number in range(batch.num_rows)]
            continue
        nested = any(pa.types.is_nested(field.type) for field in batch.schema)
        values += map(without_absent_keys, found) if nested else found
    return Rows(values, lambda row: f"{path} row {first + row}")


def _row(batch: pa.RecordBatch, number: int) -> Row | Bad:
    """One row of a batch in which some value has no Python object; a Bad where it is in this row."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = without_absent_keys(column[number].as_py(maps_as_pydicts="lossy"))
        except UnicodeDecodeError as error:
            return Bad("not UTF-8", name, f"at byte {error.start}")
        except (ValueError, OverflowError) as error:
            return Bad("no value that Python has", name, str(error).splitlines()[0])
    return row


def _require_names(path: Path, schema: pa.Schema) -> None:
    if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise Fault(f"{path}: column {twice} occurs twice")


@contextmanager
def _unpacked(path: Path) -> Iterator[tuple[Any, int]]:
    """File and size.

    Parquet is read from its end: a file that is compressed as a whole has to lie unpacked somewhere.
    """
    if not compression(path):
        with faults(path):
            size = path.stat().st_size
        yield path, size
        return
    with tempfile.TemporaryFile() as file:
        with reading(path) as (stream, _):
            shutil.copyfileobj(stream, file)
        size = file.tell()
        file.seek(0)
        yield file, size
