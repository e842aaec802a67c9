"""A part of a matrix, and its codes and scales."""

from dataclasses import dataclass

import torch

from trainer.megatron.packed_base.weight import Store

Pair = tuple[int, int]  # rows and columns
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales of blocks, and the matrix's factor


@dataclass(frozen=True)
class Part:
    """Rows of a parameter, and their box in a stored tensor."""

    start: int  # first row in the parameter
    name: str  # Megatron's, in the whole model
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # Index and number of stacked matrices, for example gate and up.
    matrix: tuple[int, int] = (0, 1)

    @classmethod
    def of_matrix(cls, name: str, shape: tuple[int, ...], number: int, count: int) -> "Part":
        """Return one whole matrix of those stacked in a stored tensor."""
        rows = shape[0] // count
        return cls(rows * number, name, (rows * number, 0), (rows, shape[1]), (number, count))

    def begin(self, rows: int) -> int:
        """Return the first row of the part's matrix in the stored tensor of `rows` rows."""
        number, count = self.matrix
        return rows // count * number


def cut(scales: torch.Tensor, offsets: Pair, sizes: Pair, block: Pair, of_scales: Pair) -> torch.Tensor:
    """Return the scales of a part's smaller blocks, from those of the matrix's blocks."""
    places = [
        (torch.arange(-(-count // small), device=scales.device) * small + begin) // size
        for count, small, begin, size in zip(sizes, block, offsets, of_scales, strict=True)
    ]
    return scales[places[0]][:, places[1]]


def unpacked(found: Found, block: Pair) -> torch.Tensor:
    """Return the values of a part's codes, in fp32."""
    codes, scales, factor = found
    factors = None if factor is None else factor.view(1, 1)
    (numbers,) = Store(codes[None].contiguous(), scales[None], block, torch.float32, factors).unpack()
    return numbers
