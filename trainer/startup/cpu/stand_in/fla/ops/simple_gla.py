"""Mamba-2's scan, computed in chunks of tokens: on a CPU, and on a GPU for sizes that have no kernel.

A head keeps a state S, a matrix of keys and values. Each token lets it decay, adds its value at its key, and reads the
value at its query:

    S = exp(g) S + k v;    o = scale q S
"""

import torch
from torch import Tensor

from trainer.startup.cpu.stand_in.fla.ops.gated_delta_rule import chunks, each_row


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, None]:
    """Return o, (rows, tokens, heads, values), and no final state. g is (rows, tokens, heads)."""
    return each_row(_row, (q * scale, k, v, g), cu_seqlens).to(v.dtype), None


def _row(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    tokens = q.shape[1]
    q, k, v, g = (chunks(x) for x in (q, k, v, g[..., None]))
    decay = g.cumsum(-2)  # since the beginning of the chunk
    between = (decay - decay.mT).tril().exp().tril()  # from one token to a later one
    inside = (q @ k.mT * between) @ v
    last = decay[..., -1:, :]
    added, kept = (k * (last - decay).exp()).mT @ v, last.exp()
    states = [torch.zeros_like(added[:, :, 0])]
    for chunk in range(q.shape[2] - 1):
        states.append(states[-1] * kept[:, :, chunk] + added[:, :, chunk])
    outputs = inside + (q * decay.exp()) @ torch.stack(states, 2)
    return outputs.flatten(2, 3)[:, :, :tokens].transpose(1, 2)
