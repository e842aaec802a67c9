"""Patch for attention of heads wider than 128 on a GPU: torch's flash attention, and matrix products above 256.

With packed rows and heads of 160, 192 or 256 numbers, Transformer Engine 2.20 and cuDNN 9.14 on an H200 return wrong
gradients: they differ by 16 to 20 % of their norm, or are NaN. The loss is right. Rows that are not packed, and latent
attention (192 and 128), are right too. Heads wider than 256 have no kernel there at all, and torch's memory-efficient
kernel takes four times as long as matrix products. Remove when Transformer Engine gives the gradients of
tests/trainer/patches/test_wide_heads.py.
"""

from bisect import bisect_right

import torch

from trainer.patches import versions

RIGHT, FLASH = 128, 256  # widest heads of Transformer Engine for packed rows, and of torch's flash attention
BLOCK = 256  # queries at a time, for heads wider than FLASH
LISTED = "_ends_on_the_host"


def install() -> None:
    """Use the kernels in this process."""
    versions.check(__name__)
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    if not hasattr(TEDotProductAttention, "of_narrow_heads"):
        TEDotProductAttention.of_narrow_heads = TEDotProductAttention.forward
        TEDotProductAttention.forward = _forward


def _forward(self, query, key, value, *others, packed_seq_params=None, **options):
    width, rows = query.shape[-1], packed_seq_params
    needed = width > FLASH or (rows is not None and width > RIGHT)
    if not needed or not query.is_cuda or query.dtype == torch.float32 or value.shape[-1] != width:
        return self.of_narrow_heads(query, key, value, *others, packed_seq_params=rows, **options)
    scale = width**-0.5 if self.config.softmax_scale is None else self.config.softmax_scale
    drop = self.config.attention_dropout if self.training else 0.0
    return attend(query, key, value, rows, scale, drop, self.window_size)


def attend(query, key, value, rows, scale: float, drop: float = 0.0, window: tuple[int, int] = (-1, 0)):
    """Return the output of causal attention, with heads side by side. `window` counts earlier tokens; -1 is all."""
    shape = (*query.shape[:-2], -1)  # [token, row] or, packed, [token]
    if rows is None:
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        ends = torch.arange(0, len(query) + 1, shape[0], dtype=torch.int32, device=query.device)
    else:
        ends = (rows.cu_seqlens_q if rows.cu_seqlens_q_padded is None else rows.cu_seqlens_q_padded).clone()
        ends[-1:].fill_(len(query))  # else the output of padding at the end would be left unwritten
    if query.shape[-1] <= FLASH:
        out = _flash(query, key, value, ends, scale, drop, window[0])
    else:
        listed = list(range(0, len(query) + 1, shape[0])) if rows is None else _listed(rows, ends)
        out = _by_blocks(query, key, value, ends, listed, scale, drop, window[0])
    return out.flatten(1) if rows is not None else out.unflatten(0, shape[1::-1]).transpose(0, 1).flatten(2)


def _flash(query, key, value, ends, scale, drop, window):
    options = {} if window < 0 else {"window_size_left": window, "window_size_right": 0}
    most = len(query)
    kernel = torch.ops.aten._flash_attention_forward
    return kernel(query, key, value, ends, ends, most, most, drop, True, False, scale=scale, **options)[0]


def _by_blocks(query, key, value, ends, listed, scale, drop, window):
    assert not drop, "heads wider than 256 have no dropout"
    query = query.unflatten(1, (key.shape[1], -1))
    heads = (tensor.transpose(0, 1).contiguous() for tensor in (query, key, value))
    return Blocks.apply(*heads, ends, listed, scale, window).transpose(0, 1).flatten(1, 2)


def _listed(rows, ends):
    """Return the ends of packed rows as numbers, read from the GPU once per micro batch."""
    if not hasattr(rows.cu_seqlens_q, LISTED):
        setattr(rows.cu_seqlens_q, LISTED, ends.tolist())
    return getattr(rows.cu_seqlens_q, LISTED)


class Blocks(torch.autograd.Function):
    """Attention by matrix products, a block of queries with all their keys at a time. Scores are in fp32.

    Inputs are [head of keys, token, ...]: queries have the heads that share a head of keys in a third dimension.
    """

    @staticmethod
    def forward(ctx, query, key, value, ends, listed, scale, window):
        ctx.save_for_backward(query, key, value, ends)
        ctx.options = listed, scale, window
        out = torch.empty_like(query)
        for queries, keys, seen in _seen(query, key, ends, *ctx.options):
            out[:, queries] = torch.bmm(seen.to(value.dtype), value[:, keys]).view_as(out[:, queries])
        return out

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, ends = ctx.saved_tensors
        _, scale, _ = ctx.options
        to_query = torch.empty_like(query)
        to_key, to_value = (torch.zeros_like(one, dtype=torch.float32) for one in (key, value))
        for queries, keys, seen in _seen(query, key, ends, *ctx.options):
            above = gradient[:, queries].flatten(1, 2)
            to_seen = _product(above, value[:, keys].mT)
            to_scores = torch.ops.aten._softmax_backward_data(to_seen, seen, -1, seen.dtype).to(query.dtype)
            to_value[:, keys] += _product(seen.to(value.dtype).mT, above)
            to_key[:, keys] += _product(to_scores.mT, query[:, queries].flatten(1, 2))
            to_query[:, queries] = torch.bmm(to_scores, key[:, keys]).view_as(to_query[:, queries])
        return to_query * scale, (to_key * scale).to(key.dtype), to_value.to(value.dtype), None, None, None, None


def _seen(query, key, ends, listed, scale, window):
    """Yield blocks of queries, the keys that one of them sees, and how much each query sees of each key."""
    places = torch.arange(query.shape[1], device=query.device)
    since = ends[torch.searchsorted(ends, places, right=True) - 1].long()  # the first key that a query sees
    if window >= 0:
        since = since.maximum(places - window)
    for begin in range(0, query.shape[1], BLOCK):
        last = min(begin + BLOCK, query.shape[1])
        first, of_last = (listed[bisect_right(listed, place) - 1] for place in (begin, last - 1))
        first = max(first, begin - window) if window >= 0 else first
        clear = begin if of_last <= first and window < 0 else first  # all see the keys before this one
        scores = _product(query[:, begin:last].flatten(1, 2), key[:, first:last].mT)
        if scale != 1:
            scores.mul_(scale)
        hidden = (places[clear:last] < since[begin:last, None]) | (places[clear:last] > places[begin:last, None])
        of_each = scores.unflatten(1, (last - begin, -1))[..., clear - first :]
        of_each.masked_fill_(hidden[:, None], float("-inf"))
        yield slice(begin, last), slice(first, last), scores.softmax(-1)


def _product(one, other):
    """Multiply matrices; the product is in fp32."""
    if one.is_cuda and one.dtype != torch.float32:
        return torch.bmm(one, other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())
