"""Recipes of released tensors: the operations by which Megatron-Bridge computes each tensor from Megatron's memory.

Bridge takes a tenth of a millisecond of Python for a tensor, and a model with experts has tens of thousands. Its
operations on the numbers are few: a view of a weight, rows in another order, an adapter added. If one process has all
weights, these operations are recorded once. Afterwards a tensor is computed by them directly. Views, and weights with
an adapter, are computed in one kernel with many others.
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
MOST = 4096  # pieces of a tensor that are recorded one by one
PLAIN = (torch.Tensor, torch.nn.Parameter)  # subclasses, such as FP8 tensors, consist of more than their memory


@dataclass(frozen=True, eq=False)
class Step:
    """A result of an operation on Megatron's memory, on other steps, and on values that are not weights."""

    operation: Any
    arguments: tuple[Any, ...]
    keys: dict[str, Any]
    number: int  # of the result, if the operation has several


Recipe = torch.Tensor | Step  # a part of Megatron's memory, or a result computed from it


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
    """Record of the operations on the memory of some modules, while this context is active."""

    def __init__(self, modules: Iterable[torch.nn.Module]):
        super().__init__()
        self.memory, self.refused = {memory(weight) for *_, weight in weights(modules)} - {0}, ""
        self._steps: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        others = [tensor for tensor in tensors if not self._is_known(tensor)]
        if self.refused or len(others) == len(tensors):
            return results
        if func._schema.is_mutable or any(tensor.is_floating_point() for tensor in others):
            # Values that are overwritten, or that come from elsewhere, may be others the next time.
            self.refused = str(func)
            return results
        # Row numbers on the host are moved to the device once: otherwise each repetition would send and wait for them.
        device = next(tensor.device for tensor in tensors if self._is_known(tensor))
        arguments, keys = tree_map_only(
            torch.Tensor, lambda tensor: self._steps.get(tensor, tensor.to(device)), (args, kwargs)
        )
        for number, result in enumerate(results if isinstance(results, (tuple, list)) else [results]):
            if isinstance(result, torch.Tensor) and not self._is_memory(result):
                self._steps[result] = Step(func, tuple(arguments), keys, number)
        return results

    def recipe(self, tensor: torch.Tensor) -> Recipe | None:
        """The recipe of a tensor; None if its operations were not recorded."""
        if self._is_memory(tensor):
            return tensor.detach()
        recipe = self._steps.get(tensor)
        while recipe is not None and recipe.operation in SAME:
            recipe = recipe.arguments[0]
        return recipe

    def _is_known(self, value: torch.Tensor) -> bool:
        return value in self._steps or self._is_memory(value)

    def _is_memory(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in PLAIN and memory(tensor) in self.memory


def weights(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Parameters and buffers of some modules, each with the dictionary of its module and its name there."""
    for module in chain.from_iterable(top.modules() for top in modules):
        for tensors in (module._parameters, module._buffers):
            yield from ((tensors, name, tensor) for name, tensor in tensors.items() if tensor is not None)


def memory(tensor: torch.Tensor) -> int:
    """Address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def memory_used(recipe: Recipe) -> set[int]:
    """Addresses of all memory that a recipe uses."""
    if isinstance(recipe, torch.Tensor):
        return {memory(recipe)}
    leaves = tree_leaves((recipe.arguments, recipe.keys))
    steps = [leaf for leaf in leaves if isinstance(leaf, Step)]
    weights = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return set[int]().union(*map(memory_used, [*steps, *weights]))


def compute(recipe: Recipe, results: dict[int, Any]) -> torch.Tensor:
    """The tensor of a recipe. `results` keeps the results of steps, for other recipes that share them."""
    if isinstance(recipe, torch.Tensor):
        return recipe
    if id(recipe) not in results:
        arguments, keys = tree_map_only(Step, lambda step: compute(step, results), (recipe.arguments, recipe.keys))
        values = recipe.operation(*arguments, **keys)
        results[id(recipe)] = values[recipe.number] if isinstance(values, (tuple, list)) else values
    return results[id(recipe)]


@torch.no_grad()
def pieces(recipe: Recipe) -> list[torch.Tensor]:
    """The parts of Megatron's memory whose concatenation is the tensor; empty if it is not such a concatenation.

    Queries, keys and values are one weight in Megatron, with separate rows for each head.
    """
    recipe = _numbers(recipe)
    if isinstance(recipe, torch.Tensor):
        return [recipe]
    inner = _numbers(recipe.arguments[0]) if _is(recipe, aten.view.default) else recipe
    if not _is(inner, aten.index.Tensor):
        return []
    whole, (rows, *others) = _numbers(inner.arguments[0]), inner.arguments[1]
    if others or not all(isinstance(value, torch.Tensor) for value in (whole, rows)):
        return []
    if rows.ndim != 1 or rows.dtype != torch.int64 or len(rows) > MOST:
        return []
    return [whole[row] for row in rows.tolist()]


def merges(recipe: Recipe) -> list[Merged]:
    """The weights with adapters whose concatenation is the tensor; empty if it is not such a concatenation."""
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
    merged = [Merged(base, all_a[0], b, scale) for base, b in zip(bases, all_b, strict=True)]
    return merged if all(map(_is_product, merged)) else []


def _is_product(merged: Merged) -> bool:
    """Whether the parts are matrices with contiguous rows, and their shapes fit."""
    if not all(part.ndim == 2 and part.stride(1) == 1 for part in merged.parts):
        return False
    return merged.base.shape == (len(merged.b), merged.a.shape[1]) and merged.b.shape[1] == len(merged.a)


def _is(value: Any, operation: Any) -> bool:
    return isinstance(value, Step) and value.operation is operation


def _numbers(value: Any) -> Any:
    """The value before conversions to fp32."""
    while (_is(value, aten._to_copy.default) and value.keys.get("dtype") is torch.float32) or _is(value, SAME[0]):
        value = value.arguments[0]
    return value


def watched(
    tensors: Iterator[tuple[str, torch.Tensor]], watch: Watch, noted: dict[str, Recipe]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass tensors on and record their recipes. The consumer's operations on them are not recorded."""
    while True:
        with watch:
            named = next(tensors, None)
            if named is None:
                return
            recipe = watch.recipe(named[1])
        if recipe is None:
            watch.refused = watch.refused or named[0]
        else:
            noted[named[0]] = recipe
        yield named
