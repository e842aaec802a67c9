"""Megatron-Bridge's index of a JSON lines file: where its lines end, so that any one of them can be read.

Byte for byte what build_index_files() of its data/datasets/utils.py leaves beside the file, which never
builds an index again once there is one, not even when the file has changed: whoever writes the file writes its index.
"""

import pickle
from pathlib import Path

import numpy as np

VERSION = "0.2"  # of Megatron-Bridge's format; it refuses any other


def write(jsonl: Path, newlines: np.ndarray) -> None:
    """FILE.idx.npy and FILE.idx.info. Every line is an object and ends in a newline, whose offset `newlines` has."""
    with Path(f"{jsonl}.idx.npy").open("wb") as f:
        np.save(f, newlines.astype(np.int64, copy=False), allow_pickle=False)
    with Path(f"{jsonl}.idx.info").open("wb") as f:
        pickle.dump({"newline_int": ord("\n"), "version": VERSION}, f)
