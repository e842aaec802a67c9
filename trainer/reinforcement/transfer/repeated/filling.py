"""Fill buckets by recipes with the same bytes as Megatron-Bridge's tensors, with few calls for each bucket."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated.recipes import Merged, Recipe, compute, merges, pieces

COMPARED = 2**24  # numbers at once


class Filling:
    """The recipes of one bucket, grouped by the way in which they are computed."""

    def __init__(self, metas: Sequence[wire.Meta], recipes: dict[str, Recipe]):
        self.metas = metas
        self.steps: list[tuple[wire.Meta, int, Recipe]] = []  # computed one by one
        self.launches: list[Any] = []  # of kernels that compute many tensors at once
        self._sort([(meta, place, recipes[meta.name]) for meta, place in wire.placed(metas)])

    def _sort(self, recipes: Sequence[tuple[wire.Meta, int, Recipe]]) -> None:
        copies: list[tuple[int, torch.Tensor]] = []
        merged: dict[tuple | None, list[tuple[int, Merged]]] = defaultdict(list)
        for meta, place, recipe in recipes:
            if of_tensor := _copied(meta, place, recipe):
                copies += of_tensor
            elif kinds := _merged(meta, place, recipe):
                for kind, at, part in kinds:
                    merged[kind].append((at, part))
            else:
                self.steps.append((meta, place, recipe))
        if copies or merged:
            from trainer.reinforcement.transfer.repeated.kernels import Copies, Merges

            self.launches += [Copies(*zip(*copies, strict=True))] if copies else []
            self.launches += [Merges(*zip(*each, strict=True)) for each in merged.values()]

    @torch.no_grad()
    def fill(self, memory: torch.Tensor) -> None:
        """Write all tensors of the bucket to its memory. The bytes between them do not change."""
        for launch in self.launches:
            launch.fill(memory)
        results: dict[int, Any] = {}
        for meta, place, recipe in self.steps:
            wire.part(memory, meta, place).copy_(compute(recipe, results))


def _copied(meta: wire.Meta, place: int, recipe: Recipe) -> list[tuple[int, torch.Tensor]]:
    """The parts of Megatron's memory that a kernel can copy for this tensor, each with its place; or an empty list."""
    parts = pieces(recipe)
    if not _are_all_of(meta, parts):
        return []
    from trainer.reinforcement.transfer.repeated.kernels import Copies

    placed = [*zip(_places(place, parts), parts, strict=True)]
    return placed if all(Copies.has(*part) for part in placed) else []


def _merged(meta: wire.Meta, place: int, recipe: Recipe) -> list[tuple[tuple | None, int, Merged]]:
    """The matrices that a kernel can merge for this tensor, each with its kind and place; or an empty list."""
    parts = merges(recipe)
    if not _are_all_of(meta, [part.base for part in parts]):
        return []
    from trainer.reinforcement.transfer.repeated.kernels import Merges

    places = _places(place, [part.base for part in parts])
    kinds = [Merges.kind(*part) for part in zip(places, parts, strict=True)]
    return [*zip(kinds, places, parts, strict=True)] if all(kinds) else []


def _are_all_of(meta: wire.Meta, parts: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor consists of these parts of a GPU's memory, and has their type."""
    alike = all(part.is_cuda and meta.dtype == wire.dtype(part) for part in parts)
    return bool(parts) and alike and sum(part.nbytes for part in parts) == meta.bytes


def _places(first: int, parts: Sequence[torch.Tensor]) -> list[int]:
    return [*accumulate((part.nbytes for part in parts[:-1]), initial=first)]


def first_unlike(metas: Sequence[wire.Meta], actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Name of the first tensor of a bucket that differs from the expected one by more than rounding."""
    for meta, place in wire.placed(metas):
        a, b = wire.part(actual, meta, place), wire.part(expected, meta, place)
        if not torch.equal(a, b) and not _is_near(a.flatten(), b.flatten()):
            return meta.name
    return None


def _is_near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if not actual.is_floating_point():
        return False
    # The second tolerance is for summands that cancel out.
    relative, absolute = torch.finfo(actual.dtype).eps, torch.finfo(torch.float32).eps
    pairs = zip(actual.split(COMPARED), expected.split(COMPARED), strict=True)
    return all(torch.allclose(a.float(), b.float(), relative, absolute) for a, b in pairs)
