"""Released tensors of a policy: Megatron-Bridge's, and how to make them again without it."""

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

MOVES = 3  # Megatron may put weights elsewhere so often: experts come together in their first step


class Export:
    """All tensors of a model in training."""

    def __init__(self, bridge: Any, model: list[torch.nn.Module]):
        self.bridge, self.model = bridge, model
        self.tasks: list[Any] | None = None  # how Bridge makes released tensors of Megatron's
        # Where several processes have the weights, they have to gather them, each time anew.
        self._moves_left = MOVES if distributed.get_world_size() == 1 else 0
        self._noted: dict[str, Recipe] = {}
        self._where: list[tuple[dict[str, Any], str, int]] = []  # weights, each by its module's own and its name

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors as released, one after another. Every rank has to take all of them."""
        if self.tasks is None:
            self.tasks = self.bridge.get_conversion_tasks(self.model)
        given = {"conversion_tasks": self.tasks, "cpu": False, "show_progress": False}
        found = ((one.param_name, one.weight) for one in self.bridge.export_hf_weights(self.model, **given))
        if self._noted or not self._moves_left:
            yield from found
            return
        watch, noted = recipes.Watch(self.model), dict[str, Recipe]()
        yield from recipes.watched(found, watch, noted)
        if watch.refused:
            self.give_up(f"{watch.refused} is not known to them")
        else:
            self._noted = noted
            used = set[int]().union(*map(recipes.memory_used, noted.values()))
            every = recipes.weights(self.model)
            self._where = [(own, name, _begin(one)) for own, name, one in every if recipes.memory(one) in used]

    def fillings(self, buckets: Sequence[Sequence[wire.Meta]]) -> list[Filling] | None:
        """One for each bucket, which fills it with its tensors; None where that is Bridge's work."""
        if not self.is_known() or {one.name for metas in buckets for one in metas} != self._noted.keys():
            return None
        return [Filling(metas, self._noted) for metas in buckets]

    def is_known(self) -> bool:
        """Whether it is known how tensors are made, and Megatron's weights lie where they did then."""
        if self._noted and any(_begin(own.get(name)) != place for own, name, place in self._where):
            self._noted = {}
            self._moves_left -= 1
            if not self._moves_left:
                self.give_up("Megatron's weights lie elsewhere each time")
        return bool(self._noted)

    def give_up(self, why: str) -> None:
        """Have Bridge make all tensors from now on."""
        say(f"weights: Megatron-Bridge exports them for every step, as recipes do not do: {why}")
        self._moves_left, self._noted = 0, {}


def _begin(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
