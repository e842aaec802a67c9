"""Writer of token sequences as Megatron-Bridge's packed Parquet, which training reads instead of text.

    input_ids      list<int32>   the rows of a pack one after another
    loss_mask      list<int8>    1 where the next token is learned: labels are one position left of their tokens
    seq_start_id   list<int32>   where each row of the pack begins

Values equal those of Megatron-Bridge's packing for the same packs (data/packing/offline.py and algorithms.py). The file
is written in row groups of 65,536 tokens. Training reads a whole row group to get one sequence. This takes 1 ms; with
groups of 250,000 tokens it would take 3 to 7 ms. The four bytes of token ids are stored separately, lowest first,
because the highest are mostly zero. A token then takes 1.4 bytes instead of 4, at 30 million tokens/s. Equal arguments
give equal bytes with one version of pyarrow.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from contract.files import open_atomically
from trainer.data.write import packing

GROUP = 1 << 16  # tokens, or one sequence if that is longer
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8())), ("seq_start_id", pa.list_(pa.int32()))]
)
FORMAT = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["loss_mask.list.element"],
    "column_encoding": {"input_ids.list.element": "BYTE_STREAM_SPLIT", "seq_start_id.list.element": "PLAIN"},
    "write_statistics": False,
}


class Source(Protocol):
    """Rows of tokens, by number."""

    lengths: np.ndarray

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of these rows, and which of them are learned."""
        ...


def write(
    path: Path, source: Source, order: np.ndarray, bounds: np.ndarray, *, pad_to: int | None, pad_id: int
) -> None:
    """Write sequences. Sequence i has the rows order[bounds[i]:bounds[i + 1]] of `source`.

    Each row is padded with pad_id to a multiple of pad_to plus one token, the last label. With pad_to None it is not
    padded.
    """
    stored = source.lengths[order]
    if pad_to is not None:
        stored = packing.padded(stored, pad_to) + 1
    ends = np.concatenate([[0], np.cumsum(stored, dtype=np.int64)])[bounds]  # of sequences, in tokens
    with (
        open_atomically(path, durable=False) as file,
        parquet.ParquetWriter(file, SCHEMA, **FORMAT) as writer,
        ThreadPoolExecutor(1) as gatherer,
    ):
        waiting = None  # one group is gathered while the previous one is compressed
        for first, last in _groups(ends):
            rows = slice(bounds[first], bounds[last])
            inner = bounds[first : last + 1] - bounds[first]
            ahead = gatherer.submit(_table, source, order[rows], stored[rows], inner, pad_id)
            if waiting:
                writer.write_table(waiting.result())
            waiting = ahead
        if waiting:
            writer.write_table(waiting.result())


def _groups(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield row groups, each as the number of its first sequence and the number after its last sequence."""
    first = 0
    while first < len(ends) - 1:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + GROUP, "right")) - 1)
        yield first, last
        first = last


def _table(source: Source, rows: np.ndarray, stored: np.ndarray, bounds: np.ndarray, pad_id: int) -> pa.Table:
    ids, learned = source.tokens(rows)
    lengths = source.lengths[rows].astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(stored, dtype=np.int64)])
    if not np.array_equal(lengths, stored):
        added = stored - lengths
        filling = np.repeat(starts[1:] - np.cumsum(added), added) + np.arange(added.sum())
        is_token = np.ones(starts[-1], bool)
        is_token[filling] = False
        padded, mask = np.full(starts[-1], pad_id, np.int32), np.zeros(starts[-1], np.int8)
        padded[is_token], mask[is_token] = ids, learned
    else:
        padded, mask = ids.astype(np.int32, copy=False), learned.astype(np.int8)
    shifted = np.append(mask[1:], np.int8(0))
    shifted[starts[1:] - 1] = 0
    ends = starts[bounds]
    begins = starts[:-1] - np.repeat(ends[:-1], np.diff(bounds))
    columns = ((padded, ends), (shifted, ends), (begins.astype(np.int32), bounds))
    return pa.Table.from_arrays(
        [
            pa.ListArray.from_arrays(_array(offsets.astype(np.int32)), _array(values), type=field.type)
            for (values, offsets), field in zip(columns, SCHEMA, strict=True)
        ],
        schema=SCHEMA,
    )


def _array(values: np.ndarray) -> pa.Array:
    """Return an Arrow array without pa.array(), which would import pandas to check for pandas values."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])
