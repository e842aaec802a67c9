"""A weight with a low-rank change, in blocks of its rows, and the check of one that was written.

    LoRA   W' = W + scale * B @ A
    DoRA   W' = magnitude * (W + scale * B @ A) / norm of each row of it

Everything is computed in fp32 and rounded once, to the type of W.
"""

from collections.abc import Iterator
from math import frexp
from typing import Protocol

import numpy as np
import torch

from trainer.weights.mapped import kept_memory

AT_ONCE = 2**19  # elements that are merged at once
TILE = 64  # Rows of a block are a multiple of it: their product is then, to the last bit, that of the whole matrix.
# Rows whose length is a multiple of this compete for the same few places of a core's cache: a product of rank 8 takes
# three times as long. They lie a little further apart.
CROWDED, APART = 256, 16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Matrix(Protocol):
    """A matrix that is asked for by rows, from the first to the last: a tensor, or one that is read (read_rows.py)."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


def merged(weight: Matrix, a: torch.Tensor, b: torch.Tensor, scale: float, magnitude) -> Iterator[torch.Tensor]:
    """The merged weight in blocks of its rows, each of which is gone when the next is asked for."""
    a, b = a.float(), b.float()
    changes, found = _room("changes", _block(weight)), _rounded(_block(weight), weight.dtype)
    exact = frexp(scale)[0] in (0.5, -0.5)  # a power of two: to multiply by it rounds nothing, now or while adding
    for rows, whole in _blocks(weight):
        change = torch.mm(b[rows], a, out=changes[: len(whole)])
        whole = whole.add_(change, alpha=scale) if exact else whole.add_(change.mul_(scale))
        if magnitude is not None:
            whole *= (magnitude[rows].float() / whole.norm(dim=1)).unsqueeze(1)
        yield found[: len(whole)].copy_(whole)


def is_merged(found: Matrix, weight: Matrix, a, b, scale: float, magnitude) -> bool:
    """Whether `found` is the merged weight, rounded to its type, computed once more in another order.

    Beside rounding, a number may be off by what fp32 loses of the largest one. Of most numbers both orders give the
    same, so that only the others are looked at one by one.
    """
    a, factor, numbers = a.float(), b.float() * scale, torch.finfo(found.dtype)
    near_zero = numbers.eps / 2 * numbers.tiny  # what rounding is off by where numbers have no exponent left
    largest, beyond = [0.0], [0.0]  # of each block: the largest number, and by how much one is off beyond rounding
    rounded = _rounded(_block(weight), found.dtype)
    for rows, released in _blocks(weight):
        whole, block = expected(released, a, factor[rows], None if magnitude is None else magnitude[rows]), found[rows]
        if other := _unequal(rounded[: len(whole)].copy_(whole), block):
            exact = whole[other]
            off = (block[other].float() - exact).abs_()
            beyond.append(float(off.sub_(exact.abs_(), alpha=numbers.eps / 2).amax()))
        largest.append(float(whole.abs_().amax()))
    most = torch.tensor(largest).amax()
    if not most.to(found.dtype).isfinite():  # nor is a number of the merged weight then
        return False
    return all(one <= 1e-5 * float(most) + near_zero for one in beyond)  # of what is not a number, neither is


def _unequal(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows and columns of the numbers whose bits differ, if any do. numpy compares bits ten times as fast as torch."""
    bits = BITS[one.element_size()]
    differ = one.view(bits).numpy() != other.view(bits).numpy()
    rows, columns = np.divmod(np.flatnonzero(differ), differ.shape[1])
    return (torch.from_numpy(rows), torch.from_numpy(columns)) if len(rows) else None


def expected(weight: torch.Tensor, a: torch.Tensor, factor: torch.Tensor, magnitude) -> torch.Tensor:
    """The merged weight, or rows of it, computed in another order than merged() does.

    `weight` is in fp32 and is overwritten; `factor` is scaled B.
    """
    whole = weight.addmm_(factor, a)
    return whole if magnitude is None else magnitude.float()[:, None] * torch.nn.functional.normalize(whole, dim=1)


def _blocks(weight: Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows that fit into a processor's own memory, in fp32, which may be overwritten: most of the time is memory's."""
    room = _room("block", _block(weight))
    for first in range(0, weight.shape[0], room.shape[0]):
        rows = slice(first, min(first + room.shape[0], weight.shape[0]))
        yield rows, room[: rows.stop - first].copy_(weight[rows])


def _block(weight: Matrix) -> tuple[int, int]:
    rows, columns = weight.shape
    return max(1, min(rows, max(1, AT_ONCE // max(1, columns) // TILE) * TILE)), columns


def _room(use: str, shape: tuple[int, int]) -> torch.Tensor:
    """Room for fp32, kept for this use."""
    rows, columns = shape
    width = columns + (APART if columns % CROWDED == 0 else 0)
    return kept_memory.take(use, rows * width, torch.float32).view(rows, width)[:, :columns]


def _rounded(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Room for a block in the type of the weight."""
    return kept_memory.take("rounded", shape[0] * shape[1], dtype).view(shape)
