"""A causal convolution of each channel over the tokens of a row."""

from itertools import pairwise

import torch
from torch.nn import functional


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Return the convolution of x, (rows, tokens, channels), and no final state."""
    assert initial_state is None and not output_final_state, "generation with a state is not supported"
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
