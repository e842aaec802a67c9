"""Digests of tensors that do not depend on how the tensors are cut, and the file of them beside a checkpoint.

The digest of a tensor is a sum over its elements, modulo 2^64: the element's bits times a number that its position in
the whole tensor gives. The sum over a tensor is therefore the sum over its pieces, wherever those lie: each rank adds
up what it holds, and no tensor is gathered. The number of a position is a product of odd numbers, one per dimension,
so no single element can change unseen; that two changes cancel out is as likely as guessing 64 bits.

Training writes the digests of what it has in memory (trainer/weights/model_digests.py); an export holds against them
what it reads (trainer/weights/torch_dist.py). This is a proof against loss and confusion, not against forgery.
"""

import json
from pathlib import Path

import torch

from contract import checksums
from contract.files import write_atomically

FILE = "tensors.json"
AT_ONCE = 2**22  # elements whose products are in memory together
DIMENSIONS = 8  # more than a tensor has
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64, in signed numbers
MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def sums(piece: torch.Tensor, offsets: tuple[int, ...], depth: int = 0) -> torch.Tensor:
    """One number for each index of the first `depth` dimensions; `offsets` is where the piece begins in the whole."""
    if piece.ndim == depth:
        piece, offsets = piece.unsqueeze(-1), (*offsets, 0)
    bits = piece.detach().view(INTEGERS[piece.element_size()])
    total = torch.zeros(piece.shape[:depth], dtype=torch.int64, device=piece.device)
    length = piece.shape[depth]
    step = max(1, AT_ONCE * length // max(1, piece.numel()))
    for start in range(0, length, step):
        part = bits.narrow(depth, start, min(step, length - start)).to(torch.int64, copy=True)
        for dim in reversed(range(depth, piece.ndim)):
            first = offsets[dim] + (start if dim == depth else 0)
            factors = place_factors(dim - depth, first, part.shape[dim], part.device)
            part = part.mul_(factors).sum(-1)  # the last dimension: those behind it are summed up
        total += part
    return total


def digest(whole: torch.Tensor) -> str:
    return text(int(sums(whole, (0,) * whole.ndim)))


def text(number: int) -> str:
    return f"{number % 2**64:016x}"


def of_all(digests: dict[str, str]) -> str:
    """One digest of many. A tensor's place among them is its name."""
    return checksums.of(json.dumps(sorted(digests.items())))


def write(folder: Path, facts: dict) -> None:
    write_atomically(folder / FILE, json.dumps(facts), durable=True)


def read(folder: Path) -> dict | None:
    """Digests beside a checkpoint; None where the version that saved it wrote none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None


def place_factors(dim: int, first: int, length: int, device) -> torch.Tensor:
    """Odd numbers that look random, each a function of dimension and position alone."""
    x = torch.arange(first, first + length, dtype=torch.int64, device=device)
    x = (x * DIMENSIONS + dim + 1) * GOLDEN
    for shift, factor in zip((30, 27), MIX, strict=True):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (x ^ ((x >> 31) & (2**33 - 1))) | 1
