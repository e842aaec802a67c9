"""Writer of Megatron-Bridge's index of a JSON lines file: the ends of its lines, for access to any line.

The index equals, byte for byte, that of build_index_files() in its data/datasets/utils.py. Bridge never rebuilds an
existing index, even if the file has changed. Therefore the writer of a file writes its index.
"""

import pickle
from pathlib import Path

import numpy as np

VERSION = "0.2"  # of Megatron-Bridge's format; it refuses any other


def write(jsonl: Path, newlines: np.ndarray) -> None:
    """Write FILE.idx.npy and FILE.idx.info.

    Every line is an object and ends in a newline; `newlines` has the offsets of the newlines.
    """
    with Path(f"{jsonl}.idx.npy").open("wb") as f:
        np.save(f, newlines.astype(np.int64, copy=False), allow_pickle=False)
    with Path(f"{jsonl}.idx.info").open("wb") as f:
        pickle.dump({"newline_int": ord("\n"), "version": VERSION}, f)
