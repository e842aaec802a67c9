"""Writer of megatron-core's indexed data sets: PREFIX.bin has the tokens of documents, PREFIX.idx their positions.

The files equal, byte for byte, those of its IndexedDatasetBuilder for documents of one sequence each, which its
tools/preprocess_data.py writes for pretraining. Tokens are streamed. Only the lengths stay in memory, 4 bytes per
document, and 28 at the end. Not covered: documents of several sequences, and the modes of multimodal data.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from contract.files import open_atomically
from contract.indexed_files import HEADER, VERSION

UINT16, INT32 = 8, 4  # core's codes of types


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
