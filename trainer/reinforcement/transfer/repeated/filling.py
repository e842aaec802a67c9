"""Buckets filled by recipes, as Megatron-Bridge's tensors would fill them, with few calls for each."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated import recipes
from trainer.reinforcement.transfer.repeated.recipes import Kitchen, Merged, Recipe

COMPARED = 2**24  # numbers at once


@dataclass(frozen=True)
class Together:
    """Weights with adapters that one kernel merges."""

    first: Merged
    table: torch.Tensor


class Filling:
    """The recipes of one bucket, sorted by how they are made."""

    def __init__(self, metas: Sequence[wire.Meta], noted: dict[str, Recipe]):
        self.metas = metas
        self.views: list[tuple[wire.Meta, int, torch.Tensor]] = []
        self.steps: list[tuple[wire.Meta, int, Recipe]] = []
        self.merged: list[tuple[wire.Meta, int, Merged, Recipe]] = []
        for one, place in zip(metas, wire.places([one.bytes for one in metas]), strict=False):
            recipe = noted[one.name]
            merged = recipes.as_merged(recipe)
            if isinstance(recipe, torch.Tensor):
                self.views.append((one, place, recipe))
            elif merged and merged.base.is_cuda and one.dtype == str(merged.base.dtype).removeprefix("torch."):
                self.merged.append((one, place, merged, recipe))
            else:
                self.steps.append((one, place, recipe))

    @cached_property
    def together(self) -> list[Together]:
        """Weights with adapters that kernels merge. The others are left to their recipes."""
        if not self.merged:
            return []
        from trainer.reinforcement.transfer.repeated import kernels

        kinds: dict[tuple, list[tuple[int, Merged]]] = defaultdict(list)
        for meta, place, one, recipe in self.merged:
            if kind := kernels.kind(one):
                kinds[kind].append((place, one))
            else:
                self.steps.append((meta, place, recipe))
        return [
            Together(each[0][1], kernels.merged_table([one for _, one in each], [place for place, _ in each]))
            for each in kinds.values()
        ]

    @torch.no_grad()
    def fill(self, memory: torch.Tensor) -> None:
        """Write all tensors of the bucket to its memory. What lies between them stays as it is."""
        if self.views:
            into = [wire.part(memory, one, place) for one, place, _ in self.views]
            torch._foreach_copy_(into, [view for *_, view in self.views])
        for one in self.together:
            from trainer.reinforcement.transfer.repeated import kernels

            kernels.merge(one.first, one.table, memory)
        kitchen = Kitchen()
        for one, place, recipe in self.steps:
            wire.part(memory, one, place).copy_(kitchen.make(recipe))


def first_unlike(metas: Iterable[wire.Meta], found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Name of the first tensor of a bucket that is more than a rounding away from what it should be."""
    metas = [*metas]
    for one, place in zip(metas, wire.places([one.bytes for one in metas]), strict=False):
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
