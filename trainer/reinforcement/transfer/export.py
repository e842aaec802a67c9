"""A policy's tensors in the released format: from Megatron-Bridge, and later by recipes without it."""

# pyright: reportArgumentType=false

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import distributed

from trainer.reinforcement.transfer import wire
from trainer.reinforcement.transfer.repeated import recipes
from trainer.reinforcement.transfer.repeated.filling import Filling
from trainer.reinforcement.transfer.repeated.recipes import Recipe
from trainer.startup.console import say

MOVES = 3  # how often Megatron may move weights in memory; for example, it joins experts in their first step


class Export:
    """All tensors of a model in training, in the released format."""

    def __init__(self, bridge: Any, model: list[torch.nn.Module]):
        self.bridge, self.model = bridge, model
        self.tasks: list[Any] | None = None  # Bridge's conversions of Megatron's weights to released tensors
        # If the weights are on several processes, these must gather them each time: no recipes then.
        self._moves_left = MOVES if distributed.get_world_size() == 1 else 0
        self._recipes: dict[str, Recipe] = {}
        # Addresses of the weights that recipes use, each with its module's dictionary and its name there.
        self._addresses: list[tuple[dict[str, Any], str, int]] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors in the released format, one after another. Every rank must take all of them."""
        if self.tasks is None:
            self.tasks = self.bridge.get_conversion_tasks(self.model)
        settings = {"conversion_tasks": self.tasks, "cpu": False, "show_progress": False}
        exported = self.bridge.export_hf_weights(self.model, **settings)
        tensors = ((tensor.param_name, tensor.weight) for tensor in exported)
        if self._recipes or not self._moves_left:
            yield from tensors
            return
        watch, noted = recipes.Watch(self.model), dict[str, Recipe]()
        yield from recipes.watched(tensors, watch, noted)
        if watch.refused:
            self.give_up(f"{watch.refused} is not supported")
        else:
            self._recipes = noted
            used = set[int]().union(*map(recipes.memory_used, noted.values()))
            weights = recipes.weights(self.model)
            self._addresses = [(of, name, _address(w)) for of, name, w in weights if recipes.memory(w) in used]

    def fillings(self, buckets: Sequence[Sequence[wire.Meta]]) -> list[Filling] | None:
        """A filling for each bucket; None if recipes are not known and Bridge must export the tensors."""
        if not self.is_known() or {meta.name for metas in buckets for meta in metas} != self._recipes.keys():
            return None
        return [Filling(metas, self._recipes) for metas in buckets]

    def is_known(self) -> bool:
        """Whether recipes are known, and Megatron's weights have the same addresses as when they were recorded."""
        if self._recipes and any(_address(of.get(name)) != address for of, name, address in self._addresses):
            self._recipes = {}
            self._moves_left -= 1
            if not self._moves_left:
                self.give_up("the addresses of Megatron's weights keep changing")
        return bool(self._recipes)

    def give_up(self, reason: str) -> None:
        """Use Bridge for all tensors from now on."""
        say(f"weights: Megatron-Bridge exports them for every step, because recipes cannot be used: {reason}")
        self._moves_left, self._recipes = 0, {}


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
