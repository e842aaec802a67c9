"""Merge of a low-rank change into a weight, in blocks of rows, and the check of a merged weight.

    LoRA   W' = W + scale * B @ A
    DoRA   W' = magnitude * (W + scale * B @ A) / norm of each row of it

Everything is computed in fp32 and rounded once, to the type of W.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import frexp

import numpy as np
import torch

from trainer.weights.mapped.read_rows import ReadRows, take

AT_ONCE = 2**19  # elements merged at a time
TILE = 64  # Blocks have multiples of this many rows: their products are then bit-identical to the whole matrix's.
# If the length of rows is a multiple of CROWDED, rows compete for the same cache lines, and a product of rank 8 takes
# three times as long. Then the distance between rows is larger by APART elements.
CROWDED, APART = 256, 16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


Matrix = torch.Tensor | ReadRows  # read by rows in order


@dataclass(frozen=True)
class Change:
    """Low-rank change of a weight."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None

    def blocks(self, weight: Matrix) -> Iterator[torch.Tensor]:
        """Yield the merged weight in blocks of rows; each block is invalid after the next is requested."""
        a, b = self.a.float(), self.b.float()
        changes, rounded = _room("changes", _block(weight)), _rounded(_block(weight), weight.dtype)
        exact = frexp(self.scale)[0] in (0.5, -0.5)  # a power of two: multiplication does not round
        for rows, whole in _blocks(weight):
            change = torch.mm(b[rows], a, out=changes[: len(whole)])
            whole = whole.add_(change, alpha=self.scale) if exact else whole.add_(change.mul_(self.scale))
            if self.magnitude is not None:
                whole *= (self.magnitude[rows].float() / whole.norm(dim=1)).unsqueeze(1)
            yield rounded[: len(whole)].copy_(whole)

    def is_in(self, found: Matrix, weight: Matrix) -> bool:
        """Whether `found` is the merged weight, rounded to its type. The merge is computed again in another order.

        In addition to rounding, a value may differ by fp32's error relative to the largest value. Most values are equal
        in both orders, so only the others are examined.
        """
        a, factor, numbers = self.a.float(), self.b.float() * self.scale, torch.finfo(found.dtype)
        near_zero = numbers.eps / 2 * numbers.tiny  # rounding error of subnormal numbers
        largest, beyond = [0.0], [0.0]  # per block: largest magnitude, and largest error beyond rounding
        rounded = _rounded(_block(weight), found.dtype)
        for rows, released in _blocks(weight):
            magnitude = None if self.magnitude is None else self.magnitude[rows]
            whole, block = expected(released, a, factor[rows], magnitude), found[rows]
            if unequal := _unequal(rounded[: len(whole)].copy_(whole), block):
                exact = whole[unequal]
                off = (block[unequal].float() - exact).abs_()
                beyond.append(float(off.sub_(exact.abs_(), alpha=numbers.eps / 2).amax()))
            largest.append(float(whole.abs_().amax()))
        most = torch.tensor(largest).amax()
        if not most.to(found.dtype).isfinite():  # then the merged weight is not finite either
            return False
        return all(error <= 1e-5 * float(most) + near_zero for error in beyond)  # false for NaN


def _unequal(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return rows and columns of values whose bits differ, if any. numpy compares bits ten times as fast as torch."""
    bits = BITS[left.element_size()]
    differ = left.view(bits).numpy() != right.view(bits).numpy()
    rows, columns = np.divmod(np.flatnonzero(differ), differ.shape[1])
    return (torch.from_numpy(rows), torch.from_numpy(columns)) if len(rows) else None


def expected(weight: torch.Tensor, a: torch.Tensor, factor: torch.Tensor, magnitude) -> torch.Tensor:
    """Return the merged weight, or rows of it, computed in another order than in Change.blocks().

    `weight` is in fp32 and is overwritten; `factor` is scaled B.
    """
    whole = weight.addmm_(factor, a)
    return whole if magnitude is None else magnitude.float()[:, None] * torch.nn.functional.normalize(whole, dim=1)


def _blocks(weight: Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield rows that fit into the processor's cache, in fp32; they may be overwritten."""
    room = _room("block", _block(weight))
    for first in range(0, weight.shape[0], room.shape[0]):
        rows = slice(first, min(first + room.shape[0], weight.shape[0]))
        yield rows, room[: rows.stop - first].copy_(weight[rows])


def _block(weight: Matrix) -> tuple[int, int]:
    rows, columns = weight.shape
    return max(1, min(rows, max(1, AT_ONCE // max(1, columns) // TILE) * TILE)), columns


def _room(use: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return cached fp32 memory for this use."""
    rows, columns = shape
    width = columns + (APART if columns % CROWDED == 0 else 0)
    return take(use, rows * width, torch.float32).view(rows, width)[:, :columns]


def _rounded(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return cached memory for a block in the type of the weight."""
    return take("rounded", shape[0] * shape[1], dtype).view(shape)
