"""The only function of Transformer Engine's extension that Megatron calls directly: splitting packed sequences."""

from itertools import pairwise

import torch


def thd_get_partitioned_indices(cu_seqlens, total_tokens: int, world_size: int, rank: int) -> torch.Tensor:
    """Indices of the tokens of a context-parallel rank: chunks r and 2*world-1-r of every sequence."""
    bounds = cu_seqlens.tolist()
    if bounds[-1] < total_tokens:
        bounds.append(total_tokens)  # padding after the last sequence is split like a sequence
    parts = []
    for start, end in pairwise(bounds):
        chunks = torch.arange(start, end, dtype=torch.int32).view(2 * world_size, -1)
        parts += [chunks[rank], chunks[2 * world_size - 1 - rank]]
    return torch.cat(parts)
