"""Initial values of an adapter from an existing one in PEFT's format (model.adapter).

The function is that of the existing adapter, whatever its rank and scale: conf/rules/starting_adapter.py has the rule
for A's that differ within a fused layer. A layer that the existing adapter lacks starts as in a new one.
"""

import re
from functools import partial
from typing import Any

import torch

from conf.peft_adapter import Weight
from conf.rules import starting_adapter
from conf.schema.run import Run
from contract.faults import Fault
from trainer.megatron import adapters
from trainer.startup.console import say
from trainer.weights import mapping
from trainer.weights.adapter_file import AdapterFile
from trainer.weights.atomic_folder import gather
from trainer.weights.merge import ADAPTER
from trainer.weights.released import enumerate_names


def install(config: Any, run: Run, bridge: Any) -> None:
    """Make the adapters of a new training start from model.adapter."""
    config.peft.start = partial(_fill, run, bridge, config.model)


def _fill(run: Run, bridge: Any, config: Any, model: Any) -> None:
    """Fill the adapters of a model from model.adapter. All ranks must call this."""
    start = StartingAdapter(run, bridge._model_bridge.mapping_registry(), config)
    adapters.fill(model, start.whole)
    start.require_all_used()
    say(f"the adapter starts from {start.adapter.folder}")


class StartingAdapter:
    """Matrices by Megatron's names; records which changes of the file were used."""

    def __init__(self, run: Run, registry: Any, config: Any):
        self.run, self.registry, self.config = run, registry, config
        self.adapter = starting_adapter.read(run)
        self.file = AdapterFile(self.adapter)
        self.used: set[Weight] = set()

    def whole(self, name: str, shape: list[int]) -> torch.Tensor:
        """Return the whole matrix A or B of a layer (and expert), before it is cut."""
        match = ADAPTER.fullmatch(name)
        assert match, name
        shared = ".experts." in match["layer"] and not match["expert"]  # adapter.experts: shared
        numbers = map(str, range(self.config.num_moe_experts)) if shared else [match["expert"]]
        first, *others = [self._of(name, match, number, shape) for number in numbers]
        if any(not torch.equal(first, other) for other in others):
            text = f"the adapters of the experts of {match['layer']} differ; adapter.experts=each"
            raise Fault(f"model.adapter: {self.adapter.folder}: {text}")
        return first

    def _of(self, name: str, match: re.Match, number: str, shape: list[int]) -> torch.Tensor:
        parts = mapping.parts(self.registry, f"{match['layer']}.weight{number}")
        if parts is None:
            raise Fault(f"model.adapter: {self.adapter.folder}: the release has no weight of {match['layer']}")
        weights = [(part.name, part.expert) for part in parts]
        changes = {weight: self.adapter.changes[weight] for weight in weights if weight in self.adapter.changes}
        self.used.update(changes)
        together, begin = starting_adapter.by_a(self.adapter, changes), 0
        is_a = match["role"] == "linear_in"
        matrix = adapters.draw(self.run.train.seed, self.run.adapter.init, name, shape) if is_a else torch.zeros(shape)
        for same in together:
            end = begin + same[0].rank
            if is_a:
                matrix[begin:end] = self.file.factors(same[0])[0]
            for part, weight in zip(parts, weights, strict=True):
                if not is_a and (change := changes.get(weight)) in same:
                    rows = part.rows(torch.arange(shape[0]), self.config)
                    matrix[rows, begin:end] = self.file.factors(change)[1] * (change.scale / self._scale())
            begin = end
        return matrix

    def _scale(self) -> float:
        adapter = self.run.adapter
        return adapter.alpha / (adapter.rank**0.5 if adapter.rslora else adapter.rank)

    def require_all_used(self) -> None:
        """Check that some rank used each change of the file."""
        if left := self.adapter.changes.keys() - set().union(*gather(self.used)):
            keys = sorted({self.adapter.changes[weight].a for weight in left})
            raise Fault(
                f"model.adapter: {self.adapter.folder}: adapter.targets has no place for {enumerate_names(keys)}"
            )
