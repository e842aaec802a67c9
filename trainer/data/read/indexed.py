"""Reader of existing indexed data sets of megatron-core: checks, and the lengths of their documents.

Damage that core would silently misread is refused: a truncated .bin, an index of another .bin, ids outside the model's
vocabulary. trainer/data/write/indexed.py describes the format.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract.faults import Fault
from contract.indexed_files import BIN, HEADER, IDX, VERSION

TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # by code in core
BLOCK = 1 << 24  # bytes of tokens checked at once
FIXED = len(HEADER) + struct.calcsize("<QBQQ")


@dataclass(frozen=True)
class Indexed:
    prefix: Path
    lengths: np.ndarray  # of each sequence; one of core's documents may be several
    tokens: np.ndarray  # memory-mapped

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes


def open_pair(prefix: Path) -> Indexed:
    """Open the data set after checking that both files are consistent. Ids are not checked."""
    bin_file, idx_file = (prefix.with_name(prefix.name + ending) for ending in (BIN, IDX))
    size = idx_file.stat().st_size
    if size < FIXED:
        raise Fault(f"{idx_file}: {size} bytes; the header alone of Megatron's index has {FIXED}")
    with idx_file.open("rb") as file:
        magic, (version, code, sequences, bounds) = file.read(len(HEADER)), struct.unpack("<QBQQ", file.read(25))
    if magic != HEADER:
        raise Fault(f"{idx_file}: begins with {magic[:8]!r}; Megatron's index begins with {HEADER[:7]!r}")
    if version != VERSION or code not in TYPES:
        fault = f"version {version}" if version != VERSION else f"tokens of type {code}"
        raise Fault(f"{idx_file}: {fault}; supported: version {VERSION} and integers (types {[*TYPES]})")
    needed = FIXED + 12 * sequences + 8 * bounds
    if size == needed + sequences and sequences:
        raise Fault(f"{idx_file}: contains modes of multimodal data; only texts are supported")
    if size != needed:
        raise Fault(f"{idx_file}: {size} bytes, but an index of {sequences} sequences has {needed}; copy it again")
    lengths, pointers, documents = (
        np.memmap(idx_file, kind, "r", offset, count) if count else np.zeros(0, kind)
        for kind, offset, count in (
            (np.dtype("<i4"), FIXED, sequences),
            (np.dtype("<i8"), FIXED + 4 * sequences, sequences),
            (np.dtype("<i8"), FIXED + 12 * sequences, bounds),
        )
    )
    kind = np.dtype(TYPES[code])
    _check_index(idx_file, lengths, pointers, documents, kind.itemsize)
    total, actual = int(lengths.sum(dtype=np.int64)), bin_file.stat().st_size
    if not total:
        raise Fault(f"{bin_file}: empty: its index has {sequences} sequences and no tokens")
    if actual != total * kind.itemsize:
        raise Fault(
            f"{bin_file}: {actual} bytes, but its index says {total} tokens of {kind.itemsize} bytes, "
            f"{total * kind.itemsize}; it is truncated, or belongs to another index"
        )
    return Indexed(prefix, lengths, np.memmap(bin_file, kind, "r", 0, total))


def _check_index(file: Path, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, width: int) -> None:
    ends = np.cumsum(lengths, dtype=np.int64) * width
    if len(lengths) and (lengths.min() < 0 or pointers[0] != 0 or (pointers[1:] != ends[:-1]).any()):
        raise Fault(f"{file}: its sequences are not contiguous in the {BIN}; it is damaged")
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise Fault(f"{file}: its documents do not end where its sequences do; it is damaged")


def check_ids(data: Indexed, vocabulary: int, report: Callable[[int], None]) -> None:
    """Raise a Fault for ids outside the model's vocabulary: on a GPU they are out of bounds."""
    width = BLOCK // data.tokens.itemsize
    for start in range(0, len(data.tokens), width):
        block = data.tokens[start : start + width]
        least, most = int(block.min()), int(block.max())
        if least < 0 or most >= vocabulary:
            wrong = least if least < 0 else most
            at = start + int(np.flatnonzero(block == wrong)[0])
            raise Fault(
                f"{data.prefix}{BIN}: token {at} is {wrong}, but the model's vocabulary has {vocabulary}; "
                "it is from another tokenizer"
            )
        report(block.nbytes)


def last_ids(data: Indexed) -> np.ndarray:
    """Return the last id of each sequence that is not empty."""
    filled = data.lengths > 0
    return np.asarray(data.tokens[np.cumsum(data.lengths, dtype=np.int64)[filled] - 1])
