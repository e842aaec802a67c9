"""Buckets filled by recipes, as Megatron-Bridge's tensors would fill them, with few calls for each."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated.recipes import Kitchen, Merged, Recipe, merges, pieces

COMPARED = 2**24  # numbers at once


class Filling:
    """The recipes of one bucket, sorted by how they are made."""

    def __init__(self, metas: Sequence[wire.Meta], noted: dict[str, Recipe]):
        self.metas = metas
        self.steps: list[tuple[wire.Meta, int, Recipe]] = []  # those that are made one by one
        self.launches: list[Any] = []  # of kernels that make many at once
        self._sort([(one, place, noted[one.name]) for one, place in wire.placed(metas)])

    def _sort(self, recipes: Sequence[tuple[wire.Meta, int, Recipe]]) -> None:
        copies: list[tuple[int, torch.Tensor]] = []
        merged: dict[tuple | None, list[tuple[int, Merged]]] = defaultdict(list)
        for one, place, recipe in recipes:
            if found := _copied(one, place, recipe):
                copies += found
            elif kinds := _merged(one, place, recipe):
                for kind, at, part in kinds:
                    merged[kind].append((at, part))
            else:
                self.steps.append((one, place, recipe))
        if copies or merged:
            from trainer.reinforcement.transfer.repeated.kernels import Copies, Merges

            self.launches += [Copies(*zip(*copies, strict=True))] if copies else []
            self.launches += [Merges(*zip(*each, strict=True)) for each in merged.values()]

    @torch.no_grad()
    def fill(self, memory: torch.Tensor) -> None:
        """Write all tensors of the bucket to its memory. What lies between them stays as it is."""
        for one in self.launches:
            one.fill(memory)
        kitchen = Kitchen()
        for one, place, recipe in self.steps:
            wire.part(memory, one, place).copy_(kitchen.make(recipe))


def _copied(one: wire.Meta, place: int, recipe: Recipe) -> list[tuple[int, torch.Tensor]]:
    """The parts of Megatron's memory that a kernel copies as they are, each with its place; none of another tensor."""
    parts = pieces(recipe)
    if not _are_all_of(one, parts):
        return []
    from trainer.reinforcement.transfer.repeated.kernels import Copies

    placed = [*zip(_places(place, parts), parts, strict=True)]
    return placed if all(Copies.has(*each) for each in placed) else []


def _merged(one: wire.Meta, place: int, recipe: Recipe) -> list[tuple[tuple | None, int, Merged]]:
    """The matrices that a kernel merges, each with its kind and its place; none of another tensor."""
    parts = merges(recipe)
    if not _are_all_of(one, [part.base for part in parts]):
        return []
    from trainer.reinforcement.transfer.repeated.kernels import Merges

    places = _places(place, [part.base for part in parts])
    kinds = [Merges.kind(*each) for each in zip(places, parts, strict=True)]
    return [*zip(kinds, places, parts, strict=True)] if all(kinds) else []


def _are_all_of(one: wire.Meta, parts: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor is these parts of a GPU's memory, and of their type."""
    alike = all(part.is_cuda and one.dtype == wire.dtype(part) for part in parts)
    return bool(parts) and alike and sum(part.nbytes for part in parts) == one.bytes


def _places(first: int, parts: Sequence[torch.Tensor]) -> list[int]:
    return [*accumulate((part.nbytes for part in parts[:-1]), initial=first)]


def first_unlike(metas: Sequence[wire.Meta], found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Name of the first tensor of a bucket that is more than a rounding away from what it should be."""
    for one, place in wire.placed(metas):
        mine, right = wire.part(found, one, place), wire.part(wanted, one, place)
        if not torch.equal(mine, right) and not _is_near(mine.flatten(), right.flatten()):
            return one.name
    return None


def _is_near(mine: torch.Tensor, right: torch.Tensor) -> bool:
    if not mine.is_floating_point():
        return False
    step, lost = torch.finfo(mine.dtype).eps, torch.finfo(torch.float32).eps  # the latter of parts that cancel out
    for some, others in zip(mine.split(COMPARED), right.split(COMPARED), strict=True):
        bound = step * torch.maximum(some.abs(), others.abs()).float() + lost
        if not bool(((some.float() - others.float()).abs() <= bound).all()):
            return False
    return True
