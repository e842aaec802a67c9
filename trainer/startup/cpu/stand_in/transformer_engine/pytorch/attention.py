"""Dot-product attention for sbhd and thd (packed) layouts: grouped queries, windows, sinks, context parallelism.

A window is the number of tokens before a token that it can attend to. A sink is a learned score per head that takes a
share of the softmax and has no value.

Context parallelism gathers keys and values from all ranks and masks by each token's position in its sequence. A rank
holds chunks r and 2*CP-1-r of every sequence, as Megatron distributes them to balance causal attention. In a rehearsal
on a CPU the gathered keys are small; the GPU kernels exchange them around a ring instead.
"""

from contextlib import nullcontext

import torch
from torch import nn
from transformer_engine_torch import thd_get_partitioned_indices


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        tp_size: int = 1,
        get_rng_state_tracker=None,
        cp_group=None,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
        **_,
    ):
        super().__init__()
        before, behind = window_size or (-1, -1)
        special = before >= 0 or softmax_type != "vanilla"
        if softmax_type not in ("vanilla", "learnable") or behind > 0 or (special and "causal" not in attn_mask_type):
            raise ValueError(f"{softmax_type} softmax with windows of {window_size} is not rehearsed on the CPU")
        self.before = before
        self.softmax_offset = None
        if softmax_type == "learnable":
            device = torch.cuda.current_device()  # as in Transformer Engine, whatever torch's default is
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // tp_size, device=device))
        self.head_dim = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.scale = softmax_scale if softmax_scale is not None else self.head_dim**-0.5
        self.attn_mask_type, self.attention_dropout = attn_mask_type, attention_dropout
        self.tracker, self.cp_group = get_rng_state_tracker, cp_group

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        qkv_format: str = "sbhd",
        cu_seqlens_q=None,
        cu_seqlens_q_padded=None,
        attn_mask_type: str | None = None,
        **_,
    ):
        mask_type = attn_mask_type or self.attn_mask_type
        packed = qkv_format == "thd"
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))  # [t, h, d] -> [t, 1, h, d]
        cp, rank = (self.cp_group.size(), self.cp_group.rank()) if self.cp_group is not None else (1, 0)
        total = query.shape[0] * cp
        ends = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        if not packed:
            ends = torch.tensor([0, total], dtype=torch.int32)
        if cp > 1:
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gather

            key, value = gather(key, group=self.cp_group), gather(value, group=self.cp_group)
        of_query = _tokens(ends, total, cp, [rank])[:, None]
        of_key = _tokens(ends, total, cp, range(cp))[None, :]
        # Padding after the last sequence attends only to itself.
        allowed = torch.searchsorted(ends, of_query, right=True) == torch.searchsorted(ends, of_key, right=True)
        if "causal" in mask_type:
            allowed &= of_query >= of_key
            if self.before >= 0:
                allowed &= of_query - of_key <= self.before
        elif attention_mask is not None and not packed:
            allowed = ~attention_mask
        out = self._attend(query, key, value, allowed)  # [b, h, s, d]
        out = out.permute(2, 0, 1, 3).flatten(2)
        return out.squeeze(1) if packed else out

    def _attend(self, query, key, value, allowed):
        dropout = self.attention_dropout if self.training else 0.0
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        if self.softmax_offset is not None:
            allowed, k, v = self._with_sinks(allowed, q, k, v)
        draws = self.tracker().fork() if dropout and self.tracker is not None else nullcontext()
        with draws:
            return nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed, dropout_p=dropout, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )

    def _with_sinks(self, allowed, q, k, v):
        """Mask, keys and values, each extended by one entry with the head's sink as score and 0 as value."""
        shape = (q.shape[0], k.shape[1], 1, k.shape[3])
        mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, float("-inf"))
        sinks = self.softmax_offset.to(q.dtype).view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        mask = torch.cat([mask.expand(1, q.shape[1], *mask.shape[-2:]), sinks], dim=-1)
        return mask, torch.cat([k, k.new_zeros(shape)], 2), torch.cat([v, v.new_zeros(*shape[:3], v.shape[3])], 2)


def _tokens(ends, total: int, cp: int, ranks) -> torch.Tensor:
    """Place of each token in the whole micro batch, in the order of the ranks' chunks."""
    if cp == 1:
        return torch.arange(total, dtype=ends.dtype)
    return torch.cat([thd_get_partitioned_indices(ends, total, cp, rank) for rank in ranks])
