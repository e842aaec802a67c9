"""Proof that the pieces of a stored tensor are all of it, each number once.

torch proves the same of every checkpoint that it plans, and holds every two pieces against one another that have
numbers of the same rows. All experts do: that took 0.6 s of CPU time a rank for 2,304 pieces of a tensor, and 2.1 s for
4,608, as 18 layers of 128 experts have them (2026-11-24). Pieces that lie at different places of a dimension in which
none is longer than 1 have no number in common, so only those with the same place are held against one another here.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def is_tiled(size: Sequence[int], pieces: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the pieces lie within a tensor of this size, fill it, and have no number in common."""
    inside = all(
        first >= 0 and count >= 0 and first + count <= length
        for piece in pieces
        for first, count, length in zip(piece.offsets, piece.sizes, size, strict=True)
    )
    whole = sum(math.prod(piece.sizes) for piece in pieces) == math.prod(size)
    return inside and whole and not _overlap(len(size), pieces)


def _overlap(dimensions: int, pieces: Sequence[ChunkStorageMetadata]) -> bool:
    single = [dim for dim in range(dimensions) if all(piece.sizes[dim] == 1 for piece in pieces)]
    rest = [dim for dim in range(dimensions) if dim not in single]
    together: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
    for piece in pieces:
        together[tuple(piece.offsets[dim] for dim in single)].append(piece)
    pairs = (pair for group in together.values() for pair in itertools.combinations(group, 2))
    return any(all(_meet(one, other, dim) for dim in rest) for one, other in pairs)


def _meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata, dim: int) -> bool:
    """Whether two pieces have a place of this dimension in common."""
    first, second = one.offsets[dim], other.offsets[dim]
    return first < second + other.sizes[dim] and second < first + one.sizes[dim]
