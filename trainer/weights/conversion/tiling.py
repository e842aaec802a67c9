"""Proof that the pieces of a stored tensor cover it exactly once.

torch proves the same for every checkpoint that it plans, but compares every two pieces that share rows. The pieces of
all experts share rows. This took 0.6 s of CPU time per rank for 2,304 pieces of a tensor, and 2.1 s for 4,608 pieces,
which is the number in 18 layers of 128 experts (2026-11-24). If every piece has length 1 in a dimension, pieces at
different places of that dimension cannot overlap. Therefore only pieces at the same place are compared here.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.default_planner import _check_box_bounds, _check_box_overlap
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def is_tiled(size: Sequence[int], pieces: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the pieces are within a tensor of this size, fill it, and do not overlap."""
    inside = all(_check_box_bounds(torch.Size(size), piece) for piece in pieces)
    whole = sum(math.prod(piece.sizes) for piece in pieces) == math.prod(size)
    single = [dim for dim in range(len(size)) if all(piece.sizes[dim] == 1 for piece in pieces)]
    together: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
    for piece in pieces:
        together[tuple(piece.offsets[dim] for dim in single)].append(piece)
    pairs = (pair for group in together.values() for pair in itertools.combinations(group, 2))
    return inside and whole and not any(_check_box_overlap(*pair) for pair in pairs)
