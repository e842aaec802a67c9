"""Attention of wide heads has the outputs and gradients of a plain computation."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from trainer.patches import wide_heads

TOKENS, HEADS, GROUPS = 600, 8, 2


def plain(query, key, value, ends, window):
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, 1) for tensor in (key, value))
    parts = []
    for first, last in pairwise(ends):
        scores = torch.einsum("qhd,khd->hqk", query[first:last], key[first:last]) * query.shape[-1] ** -0.5
        place = torch.arange(last - first, device=query.device)
        apart = place[:, None] - place[None]
        seen = (apart >= 0) & ((apart <= window) | (window < 0))
        parts.append(torch.einsum("hqk,khd->qhd", scores.where(seen, -1e30).softmax(-1), value[first:last]))
    return torch.cat(parts).flatten(1)


ON_GPU = [
    pytest.param("cuda", width, window, marks=pytest.mark.gpu) for width, window in ((192, -1), (256, -1), (256, 63))
]
EVERYWHERE = [
    pytest.param(device, 512, window, marks=[pytest.mark.gpu] * (device == "cuda"))
    for device in ("cpu", "cuda")
    for window in (-1, 63, 300)
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("device", "width", "window"), [*ON_GPU, *EVERYWHERE])
def test_outputs_and_gradients_are_those_of_a_plain_computation(device, width, window, packed):
    torch.manual_seed(0)
    drawn = [torch.randn(TOKENS, heads, width, device=device) for heads in (HEADS, GROUPS, GROUPS)]
    inputs = [tensor.bfloat16().requires_grad_() for tensor in drawn]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    ends = [0, 10, 250, 250, TOKENS] if packed else [0, TOKENS]
    rows = SimpleNamespace(cu_seqlens_q=torch.tensor(ends, device=device, dtype=torch.int32), cu_seqlens_q_padded=None)
    given = inputs if packed else [tensor[:, None] for tensor in inputs]
    found = wide_heads.attend(*given, rows if packed else None, width**-0.5, window=(window, 0)).reshape(TOKENS, -1)
    expected = plain(*exact, ends, window)
    weight = torch.randn_like(expected)
    (found.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    pairs = [
        (found.detach(), expected.detach()),
        *((one.grad, other.grad) for one, other in zip(inputs, exact, strict=True)),
    ]
    assert all(float((one.float() - other).norm() / other.norm()) < 0.01 for one, other in pairs)
