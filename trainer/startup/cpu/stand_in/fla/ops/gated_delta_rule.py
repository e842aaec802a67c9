"""The gated delta rule, computed in chunks of tokens: on a CPU, and on a GPU for sizes that have no kernel.

A head keeps a state S, a matrix of keys and values. Each token lets it decay, replaces the value stored at its key, and
reads the value at its query:

    S = exp(g) S;    S = S + k (beta (v - k S));    o = q S

Within a chunk all tokens are computed together: the values that they replace follow from a triangular system.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None, **more: object
) -> tuple[Tensor, None]:
    """Return o, (rows, tokens, heads, values), and no final state. g and beta are (rows, tokens, heads)."""
    assert not any(more.values()), f"not supported: {more}"  # states for generation, and norms of queries and keys
    return each_row(_row, (q * q.shape[-1] ** -0.5, k, v, g, beta), cu_seqlens).to(v.dtype), None


def each_row(compute: Callable[..., Tensor], inputs: Sequence[Tensor], cu_seqlens: Tensor | None) -> Tensor:
    """Return the outputs of all packed rows, each computed alone."""
    ends = [0, inputs[0].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    rows = [(start, end) for start, end in pairwise(ends) if end > start]  # the list is filled up with empty rows
    return torch.cat([compute(*(x[:, start:end] for x in inputs)) for start, end in rows], 1)


def _row(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    tokens = q.shape[1]
    q, k, v, g, beta = (chunks(x) for x in (q, k, v, g[..., None], beta[..., None]))
    decay = g.cumsum(-2)  # since the beginning of the chunk
    between = (decay - decay.mT).tril().exp().tril()  # from one token to a later one
    replaced = ((k * beta) @ k.mT * between).tril(-1)
    values, keys = (
        torch.linalg.solve_triangular(replaced, x, upper=False, unitriangular=True)
        for x in (v * beta, k * beta * decay.exp())
    )
    read = q @ k.mT * between
    state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in range(q.shape[2]):
        new = values[:, :, chunk] - keys[:, :, chunk] @ state
        outputs.append((q * decay.exp())[:, :, chunk] @ state + read[:, :, chunk] @ new)
        last = decay[:, :, chunk, -1:]
        state = state * last.exp() + (k[:, :, chunk] * (last - decay[:, :, chunk]).exp()).mT @ new
    return torch.cat(outputs, 2)[:, :, :tokens].transpose(1, 2)


def chunks(x: Tensor) -> Tensor:
    """Return (rows, tokens, heads, numbers) as (rows, heads, chunks, tokens, numbers) in fp32, with zeros added."""
    x = functional.pad(x.transpose(1, 2).float(), (0, 0, 0, -x.shape[1] % CHUNK))
    return x.contiguous().unflatten(2, (-1, CHUNK))
