"""Recipes of released tensors: how Megatron-Bridge makes each of Megatron's memory, to make it so again.

Bridge takes a tenth of a millisecond of Python for a tensor, and a model of experts has tens of thousands. What it does
with the numbers is little: a view of a weight, rows put in another order, an adapter added. Where one process has all
of the weights, its operations are noted once. From then on a tensor is made by these alone, or, where it is a view or a
weight with an adapter, together with many others in one kernel.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default)
MOST = 4096  # pieces of a tensor that are known one by one
PLAIN = (torch.Tensor, torch.nn.Parameter)  # others, as those in FP8, are more than their memory


@dataclass(frozen=True, eq=False)
class Step:
    """A result of an operation: of Megatron's memory, of other steps, and of what is no weight."""

    operation: Any
    arguments: tuple[Any, ...]
    keys: dict[str, Any]
    number: int  # of a result among several


Recipe = torch.Tensor | Step  # a part of Megatron's memory, or what is made of it


@dataclass(frozen=True)
class Merged:
    """A weight with a low-rank adapter: base + scale * b @ a, in fp32, rounded to the type of the base."""

    base: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.base, self.a, self.b


class Watch(TorchDispatchMode):
    """Notes of what is done with the memory of some modules, while it is entered."""

    def __init__(self, modules: Iterable[torch.nn.Module]):
        super().__init__()
        self.memory, self.refused = memory_of(modules), ""
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        others = [one for one in tensors if not self._is_known(one)]
        if self.refused or len(others) == len(tensors):
            return results
        if func._schema.is_mutable or any(one.is_floating_point() for one in others):
            # What is written into, or goes in from elsewhere, would have to be known as it will be the next time.
            self.refused = str(func)
            return results
        # Numbers of rows that lie on the host would be sent anew each time, and waited for.
        where = next(one.device for one in tensors if self._is_known(one))
        given, keys = tree_map_only(torch.Tensor, lambda one: self._made.get(one, one.to(where)), (args, kwargs))
        for number, result in enumerate(results if isinstance(results, (tuple, list)) else [results]):
            if isinstance(result, torch.Tensor) and not self._is_memory(result):
                self._made[result] = Step(func, tuple(given), keys, number)
        return results

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """The way that the tensor was made; None where that was not seen."""
        if self._is_memory(tensor):
            return tensor.detach()
        found = self._made.get(tensor)
        while found is not None and found.operation in SAME:
            found = found.arguments[0]
        return found

    def _is_known(self, value: torch.Tensor) -> bool:
        return value in self._made or self._is_memory(value)

    def _is_memory(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in PLAIN and memory(tensor) in self.memory


def memory_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """All places where the numbers of some modules lie."""
    return {memory(one) for *_, one in weights(modules)} - {0}


def weights(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Parameters and buffers of some modules, each behind what its module has it in, and its name there."""
    for module in chain.from_iterable(one.modules() for one in modules):
        for own in (module._parameters, module._buffers):
            yield from ((own, name, one) for name, one in own.items() if one is not None)


def memory(tensor: torch.Tensor) -> int:
    """The place of the memory that a tensor's numbers lie in."""
    return tensor.untyped_storage().data_ptr()


def memory_used(recipe: Recipe) -> set[int]:
    """All places where the numbers lie that a tensor is made of."""
    if isinstance(recipe, torch.Tensor):
        return {memory(recipe)}
    given = tree_leaves((recipe.arguments, recipe.keys), is_leaf=lambda one: isinstance(one, Step))
    parts = (
        one for one in given if isinstance(one, Step) or (isinstance(one, torch.Tensor) and one.is_floating_point())
    )
    return set[int]().union(*map(memory_used, parts))


class Kitchen:
    """Tensors made by their recipes. A step that several need is taken once, as long as it is the same kitchen."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def make(self, recipe: Recipe) -> torch.Tensor:
        if isinstance(recipe, torch.Tensor):
            return recipe
        place = id(recipe)
        if place not in self._made:
            self._made[place] = self._done(recipe)
        return self._made[place]

    def _done(self, step: Step) -> torch.Tensor:
        given, keys = tree_map_only(Step, self.make, (step.arguments, step.keys))
        results = step.operation(*given, **keys)
        return results[step.number] if isinstance(results, (tuple, list)) else results


@torch.no_grad()
def pieces(recipe: Recipe) -> list[torch.Tensor]:
    """The parts of Megatron's memory that a tensor is put together of, one behind another; none of one that is not.

    Queries, keys and values are one weight in Megatron, in which each head has rows of its own.
    """
    recipe = _numbers(recipe)
    if isinstance(recipe, torch.Tensor):
        return [recipe]
    inner = _numbers(recipe.arguments[0]) if _is(recipe, aten.view.default) else recipe
    if not _is(inner, aten.index.Tensor):
        return []
    whole, (rows, *others) = _numbers(inner.arguments[0]), inner.arguments[1]
    if others or not all(isinstance(one, torch.Tensor) for one in (whole, rows)):
        return []
    if rows.ndim != 1 or rows.dtype != torch.int64 or len(rows) > MOST:
        return []
    return [whole[row] for row in rows.tolist()]


def merges(recipe: Recipe) -> list[Merged]:
    """The weights with adapters that a tensor is put together of, one behind another; none of one that is not."""
    outer = recipe
    if _is(outer, aten._to_copy.default):
        outer = outer.arguments[0]
    if not _is(outer, aten.add.Tensor) or outer.keys or not _is(outer.arguments[1], aten.mul.Tensor):
        return []
    base, (product, scale) = outer.arguments[0], outer.arguments[1].arguments
    if not _is(product, aten.mm.default) or not isinstance(scale, float):
        return []
    bases, all_b, all_a = pieces(base), pieces(product.arguments[0]), pieces(product.arguments[1])
    if len(all_a) != 1 or len(bases) != len(all_b):
        return []
    found = [Merged(base, all_a[0], b, scale) for base, b in zip(bases, all_b, strict=True)]
    return found if all(map(_is_product, found)) else []


def _is_product(one: Merged) -> bool:
    """Whether the parts are matrices as they stand, whose rows are not scattered."""
    if not all(part.ndim == 2 and part.stride(1) == 1 for part in one.parts):
        return False
    return one.base.shape == (len(one.b), one.a.shape[1]) and one.b.shape[1] == len(one.a)


def _is(value: Any, operation: Any) -> bool:
    return isinstance(value, Step) and value.operation is operation


def _numbers(value: Any) -> Any:
    """What a conversion to fp32 was made of."""
    while (_is(value, aten._to_copy.default) and value.keys.get("dtype") is torch.float32) or _is(value, SAME[0]):
        value = value.arguments[0]
    return value


def watched(
    tensors: Iterator[tuple[str, torch.Tensor]], watch: Watch, noted: dict[str, Recipe]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors as they come, whose recipes are noted. What is done with a tensor outside is not watched."""
    while True:
        with watch:
            found = next(tensors, None)
            if found is None:
                return
            recipe = watch.recipe(found[1])
        if recipe is None:
            watch.refused = watch.refused or found[0]
        else:
            noted[found[0]] = recipe
        yield found
