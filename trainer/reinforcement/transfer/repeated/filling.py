"""Buckets filled by recipes, as Megatron-Bridge's tensors would fill them, with few calls for each."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated.recipes import Kitchen, Merged, Recipe, as_merged

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
        merges: dict[tuple, list[tuple[int, Merged]]] = defaultdict(list)
        for one, place, recipe in recipes:
            merged = as_merged(recipe)
            if isinstance(recipe, torch.Tensor) and _is_copied(one, place, recipe):
                copies.append((place, recipe))
            elif merged and (kind := _kind(one, merged)):
                merges[kind].append((place, merged))
            else:
                self.steps.append((one, place, recipe))
        if copies or merges:
            from trainer.reinforcement.transfer.repeated.kernels import Copies, Merges

            self.launches += [Copies(*zip(*copies, strict=True))] if copies else []
            self.launches += [Merges(*zip(*each, strict=True)) for each in merges.values()]

    @torch.no_grad()
    def fill(self, memory: torch.Tensor) -> None:
        """Write all tensors of the bucket to its memory. What lies between them stays as it is."""
        for one in self.launches:
            one.fill(memory)
        kitchen = Kitchen()
        for one, place, recipe in self.steps:
            wire.part(memory, one, place).copy_(kitchen.make(recipe))


def _is_copied(one: wire.Meta, place: int, view: torch.Tensor) -> bool:
    """Whether a kernel copies a part of Megatron's memory as it is."""
    if not view.is_cuda or one.dtype != wire.dtype(view) or one.shape != tuple(view.shape):
        return False
    from trainer.reinforcement.transfer.repeated.kernels import Copies

    return Copies.has(place, view)


def _kind(one: wire.Meta, merged: Merged) -> tuple | None:
    """The kind of a matrix that a kernel merges."""
    if not merged.base.is_cuda or one.dtype != wire.dtype(merged.base):
        return None
    from trainer.reinforcement.transfer.repeated.kernels import Merges

    return Merges.kind(merged)


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
