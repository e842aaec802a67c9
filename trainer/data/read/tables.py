"""Reader of Parquet and Arrow: rows as Python objects, a few megabytes at a time.

The reader decodes a file a batch at a time, and a chunk carries its batches in Arrow's stream format. Chunks are not
row groups of Parquet: a row group can be as large as the file and cannot be read from the middle. Its stored size also
does not show how large its rows are, because a prompt that all rows share is stored once.

Arrow gives all objects of a list the same keys. A key that an object lacked in the source has the value None, and is
removed. A column that is None stays. Bytes, times and decimals keep their Python type. Not covered: encrypted Parquet.
"""

import io
import mmap
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from conf.schema.row_files import compression
from contract.faults import Fault
from trainer.data.read.compressed import faults, reading
from trainer.data.read.lines import Piece
from trainer.data.rows import Bad, Row, Rows

ROWS = 20_000  # at most in a chunk
BATCH = 200  # rows of Parquet decoded at once
BUFFER = 2**20  # bytes read ahead in each column
MAGIC = b"ARROW1"


def parquet(path: Path, size: int) -> Iterator[Piece]:
    with _opened(path) as file:
        table = pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False)
        yield from _carried(path, table.schema_arrow, _of_groups(table, path.stat().st_size), size)


def arrow(path: Path, size: int) -> Iterator[Piece]:
    """Read both of Arrow's formats: a file is a stream after a magic word, with an index at its end."""
    with _opened(path) as file:
        length = file.seek(0, io.SEEK_END)
        if not length:
            raise Fault(f"{path}: empty; an Arrow file begins with its schema")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        source = pa.BufferReader(pa.py_buffer(mapped))
        if mapped[: len(MAGIC)] == MAGIC:
            if mapped[-len(MAGIC) :] != MAGIC:
                raise Fault(f"{path}: truncated: the end of an Arrow file is missing")
            source.seek(8)
        share = path.stat().st_size / length
        reader = pa.ipc.open_stream(source)
        for piece in _carried(path, reader.schema, ((batch, int(share * source.tell())) for batch in reader), size):
            yield piece
            mapped.madvise(mmap.MADV_DONTNEED)  # release pages that have been read


def without_absent_keys(value: Any, within: bool = False) -> Any:
    """Return the value; objects in lists lose the keys that are None."""
    if isinstance(value, list):
        return [without_absent_keys(inner, True) for inner in value]
    if isinstance(value, dict):
        inner = value.items()
        return {key: without_absent_keys(item, within) for key, item in inner if not (within and item is None)}
    return value


Batch = tuple[pa.RecordBatch, int]  # and the bytes of the file up to its end


def _of_groups(table: pq.ParquetFile, size: int) -> Iterator[Batch]:
    done = 0
    for number in range(table.num_row_groups):
        for batch in table.iter_batches(BATCH, row_groups=[number], use_threads=False):
            done += batch.num_rows
            yield batch, size * done // table.metadata.num_rows


def _carried(path: Path, schema: pa.Schema, batches: Iterable[Batch], size: int) -> Iterator[Piece]:
    """Yield pieces whose rows need about this size in memory, because a file may store equal values only once."""
    if repeated := next((name for name in schema.names if schema.names.count(name) > 1), None):
        raise Fault(f"{path}: column {repeated} occurs twice")
    held: list[pa.RecordBatch] = []
    size_held, rows, first = 0, 0, 1
    before = position = 0
    for batch, after in batches:
        step = max(1, min(ROWS, batch.num_rows * size // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, step):
            held.append(batch.slice(start, step))
            size_held += held[-1].nbytes
            rows += held[-1].num_rows
            position = before + (after - before) * min(start + step, batch.num_rows) // batch.num_rows
            if size_held >= size or rows >= ROWS:
                yield position, partial(_load, path, first, _packed(held))
                first += rows
                held, size_held, rows = [], 0, 0
        before = after
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
            rows = batch.to_pylist(maps_as_pydicts="lossy")
        except (ValueError, OverflowError):
            values += [_row(batch, number) for number in range(batch.num_rows)]
            continue
        nested = any(pa.types.is_nested(field.type) for field in batch.schema)
        values += map(without_absent_keys, rows) if nested else rows
    return Rows(values, f"{path} row ", range(first, first + len(values)))


def _row(batch: pa.RecordBatch, number: int) -> Row | Bad:
    """Return one row of a batch in which some value has no Python object; Bad if this row has that value."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = without_absent_keys(column[number].as_py(maps_as_pydicts="lossy"))
        except UnicodeDecodeError as error:
            return Bad("not UTF-8", name, f"at byte {error.start}")
        except (ValueError, OverflowError) as error:
            return Bad("no such value in Python", name, str(error).splitlines()[0])
    return row


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Yield the file, unpacked to disk if it is compressed as a whole: tables are read from both of their ends."""
    with faults(path):
        try:
            if not compression(path):
                with path.open("rb") as file:
                    yield file
                return
            with tempfile.TemporaryFile() as file:
                with reading(path) as (stream, _):
                    shutil.copyfileobj(stream, file)
                yield file
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise Fault(f"{path}: {(str(error).splitlines() or ['cannot be read'])[0]}") from None
