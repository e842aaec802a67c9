"""A part of a matrix, and the codes and scales of one."""

from dataclasses import dataclass

import torch

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales of blocks, and the matrix's factor


@dataclass(frozen=True)
class Part:
    """Rows of a parameter, and the box of a stored tensor that they are."""

    start: int  # first row in the parameter
    name: str  # Megatron's, in the whole model
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # Of those that are stored one below the other, as gate and up are: which, of how many.
    matrix: tuple[int, int] = (0, 1)

    def begin(self, rows: int) -> int:
        """First row of the part's matrix in the stored tensor, which has so many rows."""
        number, count = self.matrix
        return rows // count * number


def cut(
    scales: torch.Tensor,
    offsets: tuple[int, int],
    sizes: tuple[int, int],
    block: tuple[int, int],
    of_scales: tuple[int, int],
) -> torch.Tensor:
    """Scales of the smaller blocks of a part of a matrix, out of those of its blocks."""
    places = [
        (torch.arange(-(-count // small), device=scales.device) * small + begin) // size
        for count, small, begin, size in zip(sizes, block, offsets, of_scales, strict=True)
    ]
    return scales[places[0]][:, places[1]]
