"""Selection of rows and of their splits, from the rows' content alone.

The same rows are chosen on every machine, and added rows do not move existing ones to another split.

A mixture takes as many rows as its weights allow without repeating a row. For example, two sources of 900 and 1,000
rows with the weights 3 and 1 contribute 900 and 300 rows.
"""

import hashlib

import numpy as np

from conf.schema.data import Data
from trainer.data.read.likeness import first_equal
from trainer.data.rows import Row, content

SPLITS = ("training", "validation", "test")
WHOLE = float(1 << 64)


def key(row: Row) -> int:
    """Return a 64-bit hash of the row."""
    return int.from_bytes(hashlib.sha256(content(row)).digest()[:8])


def splits(keys: np.ndarray, data: Data) -> np.ndarray:
    """Return the index in SPLITS of each row."""
    place = keys / WHOLE
    return np.where(place < data.test, 2, np.where(place < data.test + data.validation, 1, 0)).astype(np.int8)


def first_pass(data: Data) -> bool:
    """Whether all rows must be counted before the first row is tokenized."""
    return data.rows is not None or bool(data.mixture)


def chosen(keys: np.ndarray, parts: np.ndarray, data: Data) -> np.ndarray:
    """Return a mask of the chosen rows; `parts` has the number of each row's source."""
    taken = np.ones(len(keys), bool)
    if data.duplicates == "drop":
        taken = first_equal(keys) == np.arange(len(keys))
    if not first_pass(data):
        return taken
    lot = _lots(keys, data.rows_seed)
    counts = np.array([np.count_nonzero(taken & (parts == part)) for part in range(len(data.parts))])
    limits = counts
    if data.mixture:
        weights = np.array([part.weight for part in data.mixture])
        shares = weights / weights.sum()
        total = min((counts / shares).min(), data.rows or np.inf)
        limits = np.minimum(counts, np.floor(total * shares + 0.5).astype(np.int64))
    elif data.rows is not None:
        limits = np.minimum(counts, data.rows)
    selected = np.zeros(len(keys), bool)
    for part, count in enumerate(limits.tolist()):
        of_part = np.flatnonzero(taken & (parts == part))
        selected[of_part[np.argsort(lot[of_part], kind="stable")[:count]]] = True
    return selected


def copies(keys: np.ndarray) -> int:
    """Return the number of rows that are copies of an earlier row."""
    return len(keys) - len(np.unique(keys))


def _lots(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return a pseudo-random number for each row (splitmix64), which is independent of the row's split."""
    mixed = keys + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
