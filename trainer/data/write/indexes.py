"""Writer of Megatron-Bridge's index of a JSON lines file: where its lines end, so that any one of them can be read.

The index equals, byte for byte, that of build_index_files() in its data/datasets/utils.py. Bridge never builds an index
again once there is one, not even when the file has changed. So the writer of a file writes its index.
"""

import pickle
from pathlib import Path

import numpy as np

VERSION = "0.2"  # of Megatron-Bridge's format; it refuses any other


def write(jsonl: Path, newlines: np.ndarray) -> None:
    """Write FILE.idx.npy and FILE.idx.info.

    Every line is an object and ends in a newline, whose offset `newlines` has.
    """
    with Path(f"{jsonl}.idx.npy").open("wb") as f:
        np.save(f, newlines.astype(np.int64, copy=False), allow_pickle=False)
    with Path(f"{jsonl}.idx.info").open("wb") as f:
        pickle.dump({"newline_int": ord("\n"), "version": VERSION}, f)
