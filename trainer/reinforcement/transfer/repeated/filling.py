"""Fill buckets by recipes with the same bytes as Megatron-Bridge's tensors, with few calls for each bucket."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated.recipes import Recipe, compute, merges, pieces

COMPARED = 2**24  # numbers at once


class Filling:
    """The recipes of one bucket, grouped by the way in which they are computed."""

    def __init__(self, metas: Sequence[wire.Meta], recipes: dict[str, Recipe]):
        self.metas = metas
        self.steps: list[tuple[wire.Meta, int, Recipe]] = []  # computed one by one
        self.launches: list[Any] = []  # of kernels that compute many tensors at once
        self._sort([(meta, place, recipes[meta.name]) for meta, place in wire.placed(metas)])

    def _sort(self, recipes: Sequence[tuple[wire.Meta, int, Recipe]]) -> None:
        launches: dict[tuple[Any, Any], list[tuple[int, Any]]] = defaultdict(list)
        for meta, place, recipe in recipes:
            parts = _of_kernels(meta, place, recipe)
            for launch, at, part in parts:
                launches[launch].append((at, part))
            if not parts:
                self.steps.append((meta, place, recipe))
        self.launches = [kernel(*zip(*parts, strict=True)) for (kernel, _), parts in launches.items()]

    @torch.no_grad()
    def fill(self, memory: torch.Tensor) -> None:
        """Write all tensors of the bucket to its memory. The bytes between them do not change."""
        for launch in self.launches:
            launch.fill(memory)
        results: dict[int, Any] = {}
        for meta, place, recipe in self.steps:
            wire.part(memory, meta, place).copy_(compute(recipe, results))


def _of_kernels(meta: wire.Meta, place: int, recipe: Recipe) -> list[tuple[tuple[Any, Any], int, Any]]:
    """The parts of a tensor that kernels copy or merge, each with its kernel, its kind and its place.

    The list is empty if kernels cannot make all of the tensor from parts of a GPU's memory of its type.
    """
    copied = pieces(recipe)
    merged = [] if copied else merges(recipe)
    bases = copied or [part.base for part in merged]
    alike = all(base.is_cuda and meta.dtype == wire.dtype(base) for base in bases)
    if not bases or not alike or sum(base.nbytes for base in bases) != meta.bytes:
        return []
    from trainer.reinforcement.transfer.repeated.kernels import Copies, Merges

    places = [*accumulate((base.nbytes for base in bases[:-1]), initial=place)]
    launches = [(Copies, Copies.has(*placed)) for placed in zip(places, copied, strict=False)]
    launches += [(Merges, Merges.kind(*placed)) for placed in zip(places, merged, strict=False)]
    complete = all(kind for _, kind in launches)
    return [*zip(launches, places, copied or merged, strict=True)] if complete else []


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
