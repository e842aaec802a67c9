"""Similarity of rows, from a signature of each: exact copies, and rows that share most of their token sequences.

For each of HASHES hash functions, a row's signature has the smallest hash of its shingles (SHINGLE consecutive tokens).
The share of equal entries estimates the share of shingles that two rows have in common (MinHash). Two rows are compared
only if they agree on a whole band of entries, and are similar if a share ALIKE of all entries agrees. Two rows that
share 0.9 of their shingles are recognised with probability 0.98; with a share of 0.5 the probability is 0.003.
"""

import numpy as np

SHINGLE = 5
HASHES = 16
BANDS = 4  # of HASHES // BANDS entries each
ALIKE = 13 / HASHES

_RNG = np.random.Generator(np.random.PCG64(20))
_FACTORS = _RNG.integers(0, 1 << 32, HASHES, dtype=np.uint32) | np.uint32(1)
_SUMMANDS = _RNG.integers(0, 1 << 32, HASHES, dtype=np.uint32)
_STEPS = _RNG.integers(0, 1 << 32, SHINGLE, dtype=np.uint32) | np.uint32(1)


def signatures(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the signatures, HASHES entries per row; the rows' tokens are concatenated."""
    if not len(lengths):
        return np.empty((0, HASHES), np.uint32)
    padded = np.concatenate([tokens.astype(np.uint32), np.zeros(SHINGLE, np.uint32)])
    padded *= np.uint32(0x9E3779B1)
    padded ^= padded >> np.uint32(15)
    hashed = np.zeros(len(tokens) + 1, np.uint32)  # one more than tokens, because reduceat needs each end as an index
    for step, factor in enumerate(_STEPS):
        hashed += padded[step : step + len(hashed)] * factor
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])
    short = np.flatnonzero(lengths < SHINGLE)  # a shingle does not reach into the next row
    steps = np.arange(SHINGLE)
    first_tokens = np.where(steps < lengths[short, None], padded[starts[short, None] + steps], np.uint32(0))
    hashed[starts[short]] = (first_tokens * _STEPS).sum(axis=1, dtype=np.uint32)
    hashed ^= hashed >> np.uint32(13)
    ends = starts + np.maximum(1, lengths - SHINGLE + 1)
    places = np.stack([starts, ends], axis=1).ravel()
    result = np.empty((len(lengths), HASHES), np.uint32)
    for number, (factor, summand) in enumerate(zip(_FACTORS, _SUMMANDS, strict=True)):
        result[:, number] = np.minimum.reduceat(hashed * factor + summand, places)[::2]
    return result


def bands(signature: np.ndarray) -> list[np.ndarray]:
    """Return a number for each band of each signature; equal bands have equal numbers."""
    width = HASHES // BANDS
    numbers = []
    for band in range(BANDS):
        mixed = np.zeros(len(signature), np.uint64)
        for entry in range(band * width, (band + 1) * width):
            mixed = (mixed ^ signature[:, entry]) * np.uint64(0x9E3779B97F4A7C15)
        numbers.append(mixed)
    return numbers


def first_equal(keys: np.ndarray) -> np.ndarray:
    """Return, for each row, the first row with the same key (possibly itself), as int32."""
    if not len(keys):
        return np.empty(0, np.int32)
    order = np.argsort(keys, kind="stable").astype(np.int32)
    ordered = keys[order]
    heads = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])).astype(np.int32)
    first = np.empty(len(keys), np.int32)
    first[order] = np.repeat(order[heads], np.diff(heads, append=len(keys)))
    return first


def agree(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left == right).mean(axis=1) >= ALIKE
