"""Writer of the indexes that training reads, of tokens and of JSON lines.

megatron-core's indexed data sets: PREFIX.bin has the tokens of documents, PREFIX.idx their positions.

The files equal, byte for byte, those of its IndexedDatasetBuilder for documents of one sequence each, which its
tools/preprocess_data.py writes for pretraining. Tokens are streamed. Only the lengths stay in memory, 4 bytes per
document, and 28 at the end. Not covered: documents of several sequences, and the modes of multimodal data.

Megatron-Bridge's index of a JSON lines file has the ends of its lines, for access to any line. It equals, byte for
byte, that of build_index_files() in its data/datasets/utils.py. Bridge never rebuilds an existing index, even if the
file has changed. Therefore the writer of a file writes its index.
"""

import pickle
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from contract.files import open_atomically
from contract.indexed_files import HEADER, VERSION

UINT16, INT32 = 8, 4  # core's codes of types
LINES_VERSION = "0.2"  # of Megatron-Bridge's index of lines; it refuses any other


def write(prefix: Path, batches: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> None:
    """Write batches: each has the concatenated ids of some documents, and the number of ids of each document."""
    dtype, code = (np.uint16, UINT16) if vocab_size < 65500 else (np.int32, INT32)
    lengths = [np.zeros(0, np.int32)]
    with open_atomically(Path(f"{prefix}.bin"), durable=False) as f:
        for ids, counts in batches:
            assert len(ids) == counts.sum(), (len(ids), int(counts.sum()))
            assert not len(ids) or (ids.min() >= 0 and ids.max() <= np.iinfo(dtype).max), (ids.min(), ids.max(), dtype)
            f.write(ids.astype(dtype, copy=False).tobytes())
            lengths.append(counts.astype(np.int32))
    counts = np.concatenate(lengths)
    with open_atomically(Path(f"{prefix}.idx"), durable=False) as f:
        f.write(HEADER + struct.pack("<QBQQ", VERSION, code, len(counts), len(counts) + 1))
        f.write(counts.tobytes())
        ends = np.cumsum(counts, dtype=np.int64) * np.dtype(dtype).itemsize
        f.write(np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(counts)].tobytes())
        f.write(np.arange(len(counts) + 1, dtype=np.int64).tobytes())


def write_lines(jsonl: Path, newlines: np.ndarray) -> None:
    """Write FILE.idx.npy and FILE.idx.info.

    Every line is an object and ends in a newline; `newlines` has the offsets of the newlines.
    """
    np.save(f"{jsonl}.idx.npy", newlines.astype(np.int64, copy=False), allow_pickle=False)
    Path(f"{jsonl}.idx.info").write_bytes(pickle.dumps({"newline_int": ord("\n"), "version": LINES_VERSION}))
