"""Writer of megatron-core's indexed data sets: PREFIX.bin holds the tokens of documents, PREFIX.idx where each begins.

The files equal, byte for byte, those of its IndexedDatasetBuilder when every document is one sequence, as its
tools/preprocess_data.py writes them for pretraining. Tokens are written as they come. The lengths alone stay in memory,
4 bytes a document until the end and 28 then. Not covered: documents of several sequences, and the modes of multimodal
data.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from contract.indexed_files import HEADER, VERSION

UINT16, INT32 = 8, 4  # its codes of types


def write(prefix: Path, batches: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> None:
    """Write batches. Each holds the ids of some documents one after another, and the number of each document's ids."""
    dtype, code = (np.uint16, UINT16) if vocab_size < 65500 else (np.int32, INT32)
    bin_file, idx_file = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    lengths = [np.zeros(0, np.int32)]
    with _partial(bin_file).open("wb") as f:
        for ids, counts in batches:
            assert len(ids) == counts.sum(), (len(ids), int(counts.sum()))
            assert not len(ids) or (ids.min() >= 0 and ids.max() <= np.iinfo(dtype).max), (ids.min(), ids.max(), dtype)
            f.write(ids.astype(dtype, copy=False).tobytes())
            lengths.append(counts.astype(np.int32))
    counts = np.concatenate(lengths)
    with _partial(idx_file).open("wb") as f:
        f.write(HEADER + struct.pack("<QBQQ", VERSION, code, len(counts), len(counts) + 1))
        f.write(counts.tobytes())
        ends = np.cumsum(counts, dtype=np.int64) * np.dtype(dtype).itemsize
        f.write(np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(counts)].tobytes())
        f.write(np.arange(len(counts) + 1, dtype=np.int64).tobytes())
    _partial(bin_file).replace(bin_file)
    _partial(idx_file).replace(idx_file)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
