"""Digests of tensors that are independent of how the tensors are cut, and their file next to a checkpoint.

The digest of a tensor is a sum over its elements, modulo 2^64: the element's bits times a factor that depends on its
position in the whole tensor. The sum over a tensor is therefore the sum over its pieces: each rank adds up its own, and
no tensor is gathered. A position's factor is a product of odd numbers, one per dimension, so a change of a single
element is always detected; two changes cancel only with the probability of guessing 64 bits.

Training writes the digests of its memory (trainer/weights/model_digests.py); an export compares the tensors that it
reads with them (trainer/weights/torch_dist.py). This detects loss and confusion, not forgery.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from contract import checksums
from contract.files import write_atomically

FILE = "tensors.json"
AT_ONCE = 2**22  # elements multiplied at a time
WORD = 8  # bytes
DIMENSIONS = 8  # more than any tensor has
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64, in signed numbers
MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def sums(piece: torch.Tensor, offsets: tuple[int, ...], depth: int = 0) -> torch.Tensor:
    """Return one number per index of the first `depth` dimensions; `offsets` is the piece's start in the tensor."""
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
            part = part.mul_(factors).sum(-1)  # the last remaining dimension; later ones are already summed
        total += part
    return total


def sum_of_words(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of the bits of these tensors in words of 8 bytes, modulo 2^64. One changed bit always changes it."""
    parts: list[torch.Tensor] = []
    for tensor in tensors:
        size, flat = tensor.element_size(), tensor.detach().reshape(-1)
        aligned = flat.storage_offset() * size % WORD == 0
        whole = flat.numel() * size // WORD * WORD // size if aligned else 0
        parts += [flat[:whole].view(torch.int64)] if whole else []
        parts += [flat[whole:].view(INTEGERS[size])] if whole < flat.numel() else []
    return functools.reduce(torch.add, (part.sum(dtype=torch.int64) for part in parts))


def digest(whole: torch.Tensor) -> str:
    return text(int(sums(whole, (0,) * whole.ndim)))


def text(number: int) -> str:
    return f"{number % 2**64:016x}"


def of_all(digests: dict[str, str]) -> str:
    """Return one digest of many digests; it depends on the tensors' names."""
    return checksums.of(json.dumps(sorted(digests.items())))


def write(folder: Path, facts: dict) -> None:
    write_atomically(folder / FILE, json.dumps(facts), durable=True)


def read(folder: Path) -> dict | None:
    """Return the digests next to a checkpoint; None if its version wrote none."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.exists() else None


def place_factors(dim: int, first: int, length: int, device) -> torch.Tensor:
    """Return odd pseudo-random numbers that depend only on dimension and position."""
    x = torch.arange(first, first + length, dtype=torch.int64, device=device)
    x = (x * DIMENSIONS + dim + 1) * GOLDEN
    for shift, factor in zip((30, 27), MIX, strict=True):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (x ^ ((x >> 31) & (2**33 - 1))) | 1
