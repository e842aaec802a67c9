"""Reader and writer of megatron-core's indexed data sets, and writer of Megatron-Bridge's index of JSON lines.

PREFIX.bin has the tokens of documents, PREFIX.idx their positions. megatron-core would silently misread damaged files.
Therefore this reader refuses a truncated .bin, an index of another .bin, and ids outside the model's vocabulary.

Written files equal, byte for byte, those of core's IndexedDatasetBuilder for documents of one sequence each, which its
tools/preprocess_data.py writes for pretraining. Tokens are streamed. Only the lengths stay in memory: 4 bytes per
document, and 28 bytes per document at the end. Not covered: documents of several sequences, and the modes of
multimodal data.

Megatron-Bridge's index of a JSON lines file has the ends of its lines, for access to any line. It equals, byte for
byte, that of build_index_files() in its data/datasets/utils.py. Bridge never rebuilds an existing index, even if the
file has changed. Therefore the writer of a file writes its index.
"""

import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contract.faults import Fault
from contract.files import open_atomically
from contract.indexed_files import BIN, HEADER, IDX, VERSION

TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # by code in core
FIELDS = struct.Struct("<QBQQ")  # version, code of the type, sequences, bounds of documents
FIXED = len(HEADER) + FIELDS.size
BLOCK = 1 << 24  # bytes of tokens checked at once
LINES_VERSION = "0.2"  # of Megatron-Bridge's index of lines; it refuses any other


@dataclass(frozen=True)
class Indexed:
    prefix: Path
    lengths: np.ndarray  # of each sequence; a document may have several sequences
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
        magic, (version, code, sequences, bounds) = file.read(len(HEADER)), FIELDS.unpack(file.read(FIELDS.size))
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
    """Raise a Fault for ids outside the model's vocabulary, which would be an access out of bounds on a GPU."""
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


def write(prefix: Path, batches: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> None:
    """Write batches: each has the concatenated ids of some documents, and the number of ids of each document."""
    code = 8 if vocab_size < 65500 else 4
    dtype = TYPES[code]
    lengths = [np.zeros(0, np.int32)]
    with open_atomically(f"{prefix}{BIN}", durable=False) as f:
        for ids, counts in batches:
            assert len(ids) == counts.sum(), (len(ids), int(counts.sum()))
            assert not len(ids) or (ids.min() >= 0 and ids.max() <= np.iinfo(dtype).max), (ids.min(), ids.max(), dtype)
            f.write(ids.astype(dtype, copy=False).tobytes())
            lengths.append(counts.astype(np.int32))
    counts = np.concatenate(lengths)
    with open_atomically(f"{prefix}{IDX}", durable=False) as f:
        f.write(HEADER + FIELDS.pack(VERSION, code, len(counts), len(counts) + 1))
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
