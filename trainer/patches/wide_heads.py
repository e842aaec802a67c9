"""Patch for attention of heads wider than 128 on a GPU: torch's kernels instead of Transformer Engine's.

With packed rows and heads of 160, 192 or 256 numbers, Transformer Engine 2.20 and cuDNN 9.14 on an H200 return wrong
gradients: they differ by 16 to 20 % of their norm, or are NaN. The loss is right. Rows that are not packed, and latent
attention (192 and 128), are right too. Heads wider than 256 have no kernel there at all. Remove when Transformer Engine
gives the gradients of tests/trainer/patches/test_wide_heads.py.
"""

import torch

from trainer.patches import versions

RIGHT, FLASH = 128, 256  # widest heads of Transformer Engine for packed rows, and of torch's flash attention
CAUSAL = 1  # torch's number of the mask


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
        count = shape[0]
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        ends = torch.arange(0, len(query) + 1, count, dtype=torch.int32, device=query.device)
    else:
        ends = (rows.cu_seqlens_q if rows.cu_seqlens_q_padded is None else rows.cu_seqlens_q_padded).clone()
        ends[-1] = len(query)  # else the output of padding at the end would be left unwritten
    out = (_flash if query.shape[-1] <= FLASH else _any_width)(query, key, value, ends, scale, drop, window[0])
    return out.flatten(1) if rows is not None else out.unflatten(0, shape[1::-1]).transpose(0, 1).flatten(2)


def _flash(query, key, value, ends, scale, drop, window):
    options = {} if window < 0 else {"window_size_left": window, "window_size_right": 0}
    most = len(query)
    kernel = torch.ops.aten._flash_attention_forward
    return kernel(query, key, value, ends, ends, most, most, drop, True, False, scale=scale, **options)[0]


def _any_width(query, key, value, ends, scale, drop, window):
    assert window < 0, "this kernel has no windows"
    most, groups = len(query), query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    whole = (query[None], key[None], value[None])
    kernel = torch.ops.aten._efficient_attention_forward
    return kernel(*whole, None, ends, ends, most, most, drop, CAUSAL, True, scale=scale)[0][0]
