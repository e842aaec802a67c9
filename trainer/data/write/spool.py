"""Spool of the work on chunks: one file per chunk of the source; tokens are read back from it by row.

    spool/0-000012.chunk    concatenated arrays; the header describes them

A file appears by rename when it is complete, so files of a killed preparation can be used. Tokens are uint32; the top
bit marks a learned token. Files are read with pread, because mapped pages would count as memory in use.
"""

import itertools
import json
import os
import resource
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from contract.files import open_atomically

LEARNED = np.uint32(1 << 31)
OPEN = 16384  # open files of this process; packing reads chunks in any order
KEPT_FREE = 128
BLOCK = 1 << 19  # rows searched at once
HEADER = 8  # bytes of the header's length


def write(path: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    head = {name: [str(array.dtype), array.size] for name, array in arrays.items()}
    header = json.dumps({"arrays": head, "facts": facts}).encode()
    with open_atomically(path, durable=True) as file:
        file.write(len(header).to_bytes(HEADER) + header)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


class ChunkFile:
    """Arrays and facts of one chunk."""

    def __init__(self, path: Path):
        self.file = os.open(path, os.O_RDONLY)
        length = int.from_bytes(os.pread(self.file, HEADER, 0))
        header = json.loads(os.pread(self.file, length, HEADER))
        self.facts: dict[str, Any] = header["facts"]
        self.places: dict[str, tuple[np.dtype, int, int]] = {}
        self.bounds: dict[str, np.ndarray] = {}
        at = HEADER + length
        for name, (dtype, size) in header["arrays"].items():
            kind = np.dtype(dtype)
            self.places[name] = (kind, size, at)
            at += kind.itemsize * size
        if os.fstat(self.file).st_size != at:
            raise ValueError(f"{path}: {at} bytes expected")

    def read(self, name: str, start: int = 0, end: int | None = None) -> np.ndarray:
        kind, size, at = self.places[name]
        end = size if end is None else end
        left = (end - start) * kind.itemsize
        at += start * kind.itemsize
        parts = []
        while left:  # pread returns at most 2 GB
            parts.append(os.pread(self.file, left, at))
            left, at = left - len(parts[-1]), at + len(parts[-1])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), kind)

    def ends(self, name: str) -> np.ndarray:
        """Return the end of each row, from the array of the rows' lengths, with a 0 first."""
        if name not in self.bounds:
            ends = np.zeros(self.places[name][1] + 1, np.uint32)  # kept in memory for all chunks: 4 bytes per row
            np.cumsum(self.read(name), dtype=np.uint32, out=ends[1:])
            self.bounds[name] = ends
        return self.bounds[name]

    def close(self) -> None:
        os.close(self.file)


class Spool:
    """All chunks, in order; rows are numbered through them."""

    def __init__(self, paths: list[Path]):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < OPEN:
            raised = OPEN if hard == resource.RLIM_INFINITY else min(OPEN, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        self.limit = max(1, min(OPEN, soft) - KEPT_FREE)
        self.paths = paths
        self.opened: OrderedDict[int, ChunkFile] = OrderedDict()
        counts = [self.chunk(number).places["length"][1] for number in range(len(paths))]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def chunk(self, number: int) -> ChunkFile:
        if number in self.opened:
            self.opened.move_to_end(number)
            return self.opened[number]
        if len(self.opened) >= self.limit:
            self.opened.popitem(last=False)[1].close()
        self.opened[number] = ChunkFile(self.paths[number])
        return self.opened[number]

    def column(self, name: str, dtype: type, rows: np.ndarray | None = None) -> np.ndarray:
        """Return one value for each row of all chunks, or for some rows in ascending order."""
        return self.table(name, dtype, 1, rows)[:, 0]

    def table(self, name: str, dtype: type, width: int, rows: np.ndarray | None = None) -> np.ndarray:
        """Return `width` values for each row of all chunks, or for some rows in ascending order."""
        bounds = self.starts if rows is None else np.searchsorted(rows, self.starts)
        result = np.empty((bounds[-1], width), dtype)
        for number, (start, end) in enumerate(itertools.pairwise(bounds)):
            values = self.chunk(number).read(name).reshape(-1, width)
            result[start:end] = values if rows is None else values[rows[start:end] - self.starts[number]]
        return result

    def facts(self) -> list[dict[str, Any]]:
        return [self.chunk(number).facts for number in range(len(self.paths))]

    def chunks_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of each row's chunk."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    def runs(self, rows: np.ndarray, lengths: str) -> Iterator[tuple[ChunkFile, int, int]]:
        """Yield the ranges of the rows in their chunks, neighbours merged. `lengths` names the array of row lengths."""
        for start in range(0, len(rows), BLOCK):
            yield from self._runs(rows[start : start + BLOCK], lengths)

    def _runs(self, rows: np.ndarray, lengths: str) -> Iterator[tuple[ChunkFile, int, int]]:
        chunks = self.chunks_of(rows)
        breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(chunks) != 0)) + 1
        firsts, lasts = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(rows)]]) - 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            number = int(chunks[first])
            file = self.chunk(number)
            ends = file.ends(lengths)
            start, end = int(rows[first] - self.starts[number]), int(rows[last] - self.starts[number])
            yield file, int(ends[start]), int(ends[end + 1])


class Sequences:
    """Some rows of a spool, for the writers of token files."""

    def __init__(self, spool: Spool, rows: np.ndarray):
        self.spool, self.rows = spool, rows
        self.lengths = spool.column("length", np.int32, rows)

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated token ids of these rows, and whether each is learned."""
        pieces = [file.read("tokens", start, end) for file, start, end in self.spool.runs(self.rows[rows], "length")]
        joined = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        return (joined & ~LEARNED).astype(np.int32), joined >= LEARNED


class Answers:
    """Two answers to one prompt as two rows: number 2i is the chosen answer of row i, 2i + 1 the rejected one."""

    def __init__(self, pairs: Sequences):
        first = pairs.spool.column("first", np.int32, pairs.rows)
        self.pairs = pairs
        self.lengths = np.stack([first, pairs.lengths - first], axis=1).ravel()

    def tokens(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and learned marks of these rows, in which both answers of a pair are adjacent."""
        return self.pairs.tokens(rows[::2] // 2)
