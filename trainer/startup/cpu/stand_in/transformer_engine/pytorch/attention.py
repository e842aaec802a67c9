"""Dot-product attention for sbhd and thd (packed) layouts: grouped queries, windows, sinks, context parallelism.

A window is the number of tokens before a token that it can attend to. A sink is a learned score per head that takes a
share of the softmax and has no value.

Context parallelism gathers keys and values from all ranks and masks by each token's position in its sequence. A rank
holds chunks r and 2*CP-1-r of every sequence, as Megatron distributes them to balance causal attention. In a rehearsal
on a CPU the gathered keys are small; the GPU kernels exchange them around a ring instead.
"""

import torch
from torch import nn


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type: str = "p2p",
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
        self.tracker, self.cp_group, self.cp_comm_type = get_rng_state_tracker, cp_group, cp_comm_type

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

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
        cp = self.cp_group.size() if self.cp_group is not None else 1
        rank = self.cp_group.rank() if cp > 1 else 0
        bounds = cu_seqlens_q_padded if cu_seqlens_q_padded is not None else cu_seqlens_q
        lengths = bounds.diff().tolist() if packed else [query.shape[0] * cp]
        total = query.shape[0] * cp
        lengths.append(total - sum(lengths))  # padding after the last sequence attends only to itself
        if cp > 1:
            key, value = _gather(key, self.cp_group), _gather(value, self.cp_group)
        segment_q, place_q = _places(lengths, cp, [rank])
        segment_k, place_k = _places(lengths, cp, range(cp))
        allowed = segment_q[:, None] == segment_k[None, :]
        if "causal" in mask_type:
            allowed &= place_q[:, None] >= place_k[None, :]
            if self.before >= 0:
                allowed &= place_q[:, None] - place_k[None, :] <= self.before
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
        arguments = {
            "attn_mask": allowed,
            "dropout_p": dropout,
            "scale": self.scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if dropout and self.tracker is not None:
            with self.tracker().fork():
                return nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
        return nn.functional.scaled_dot_product_attention(q, k, v, **arguments)

    def _with_sinks(self, allowed, q, k, v):
        """Mask, keys and values, each extended by one entry with the head's sink as score and 0 as value."""
        shape = (q.shape[0], k.shape[1], 1, k.shape[3])
        mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, float("-inf"))
        sinks = self.softmax_offset.to(q.dtype).view(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)
        mask = torch.cat([mask.expand(1, q.shape[1], *mask.shape[-2:]), sinks], dim=-1)
        return mask, torch.cat([k, k.new_zeros(shape)], 2), torch.cat([v, v.new_zeros(*shape[:3], v.shape[3])], 2)


def _places(lengths: list[int], cp: int, ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's sequence number and position in it, in the order of the ranks' chunks."""
    segments, places = [], []
    for rank in ranks:
        for i, length in enumerate(lengths):
            own = torch.arange(length)
            if cp > 1:
                chunks = own.view(2 * cp, -1)
                own = torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])
            places.append(own)
            segments.append(torch.full_like(own, i))
    return torch.cat(segments), torch.cat(places)


class _Gather(torch.autograd.Function):
    """Concatenate the rows of all ranks; backward sums a row's gradient and sends it to the rank that holds the row."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def _gather(x, group):
    return _Gather.apply(x, group)
