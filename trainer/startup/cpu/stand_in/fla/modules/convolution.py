"""A causal convolution of each channel over the tokens of a row."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    cu_seqlens: Tensor | None = None,
    **more,
) -> tuple[Tensor, None]:
    """Return the convolution of x, (rows, tokens, channels), and no final state."""
    assert not any(more.values()), f"not supported: {more}"  # states for generation
    channels, width = weight.shape
    rows = x.transpose(1, 2)
    ends = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [
        functional.conv1d(functional.pad(rows[..., start:end], (width - 1, 0)), weight[:, None], bias, groups=channels)
        for start, end in pairwise(ends)
        if end > start  # the list of packed rows is filled up with empty ones
    ]
    if activation in ("silu", "swish"):
        parts = [functional.silu(part) for part in parts]
    return torch.cat(parts, -1).transpose(1, 2), None
