"""Patch for rotary positions of packed rows: every token of a row is turned at once.

Megatron-core's own way, where Transformer Engine's fused kernel is off (every family but Llama), asks the GPU for the
lengths of a row's sequences, in every layer for queries and for keys, and turns one sequence after the other: some ten
kernels each, and the host waits for the GPU each time. With 22 sequences to a row a step on an H200 took 2.5 times as
long as one of rows of one sequence. Here each token's position is computed on the GPU, once for a microbatch, and the
same arithmetic is done for all tokens together: the numbers are the same to the last bit. Can go when
_apply_rotary_pos_emb_thd has no loop.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/models/common/embeddings/rope_utils.py
"""

import torch
from megatron.core.models.common.embeddings import rope_utils

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}
KEPT = "_positions_of_tokens"


def install() -> None:
    """Have packed rows turned at once, in this process."""
    versions.check(__name__, WRITTEN_FOR)
    rope_utils._apply_rotary_pos_emb_thd = turned


def turned(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    mla_rotary_interleaved: bool = False,
    mscale: float = 1.0,
    cp_group: torch.distributed.ProcessGroup | None = None,
    multi_latent_attention: bool | None = None,
) -> torch.Tensor:
    """Queries or keys of packed rows, turned by each token's place in its sequence: [tokens here, heads, width].

    `freqs` with a row for every token of the whole rows has positions that go on from sequence to sequence.
    """
    if cp_group is None:
        raise ValueError("cp_group must be provided for THD format RoPE")
    if multi_latent_attention is not None:
        mla_rotary_interleaved = multi_latent_attention
    ranks, rank = cp_group.size(), cp_group.rank()
    of_whole_rows = freqs.size(0) == t.size(0) * ranks
    return rope_utils._apply_rotary_pos_emb_bshd(
        t.unsqueeze(1),
        freqs[_positions(cu_seqlens, t.size(0), ranks, rank, of_whole_rows)],
        rotary_interleaved=rotary_interleaved,
        mla_rotary_interleaved=mla_rotary_interleaved,
        mscale=mscale,
    ).squeeze(1)


def _positions(cu_seqlens: torch.Tensor, tokens: int, ranks: int, rank: int, of_whole_rows: bool) -> torch.Tensor:
    """Position of each token of this rank. It is kept on the tensor that it follows from, for the layers to come."""
    kept = getattr(cu_seqlens, KEPT, None)
    if kept is None:
        setattr(cu_seqlens, KEPT, kept := {})
    key = tokens, ranks, rank, of_whole_rows
    if key not in kept:
        kept[key] = _computed(cu_seqlens.long(), tokens, ranks, rank, of_whole_rows)
    return kept[key]


def _computed(starts: torch.Tensor, tokens: int, ranks: int, rank: int, of_whole_rows: bool) -> torch.Tensor:
    """Positions, without asking the GPU for a number.

    Of a sequence cut in 2 x ranks pieces a rank has two: its own from the beginning and its own from the end.
    """
    lengths = (starts[1:] - starts[:-1]) // ranks  # this rank's part of each sequence
    ends = lengths.cumsum(0)
    place = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(ends, place, right=True)
    length = lengths[sequence]
    position = place - (ends[sequence] - length)
    if ranks > 1:
        piece = length // 2
        later = position - piece + length * ranks - (rank + 1) * piece
        position = torch.where(position < piece, position + rank * piece, later)
    return position + starts[sequence] if of_whole_rows else position
