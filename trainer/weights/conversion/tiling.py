"""Proof that the pieces of a stored tensor cover it exactly once.

torch proves the same for every checkpoint that it plans, but compares every two pieces that share rows. All experts do:
that took 0.6 s of CPU time per rank for 2,304 pieces of a tensor, and 2.1 s for 4,608, the number in 18 layers of 128
experts (2026-11-24). Pieces at different places of a dimension in which every piece has length 1 cannot overlap, so
only pieces with the same place are compared here.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def is_tiled(size: Sequence[int], pieces: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the pieces are within a tensor of this size, fill it, and do not overlap."""
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
    return any(all(_meet(left, right, dim) for dim in rest) for left, right in pairs)


def _meet(left: ChunkStorageMetadata, right: ChunkStorageMetadata, dim: int) -> bool:
    """Whether two pieces overlap in this dimension."""
    first, second = left.offsets[dim], right.offsets[dim]
    return first < second + right.sizes[dim] and second < first + left.sizes[dim]
