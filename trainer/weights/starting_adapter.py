"""Initial values of an adapter from an existing one in PEFT's format (model.adapter).

Megatron has one A for all released weights of a fused layer, and this project's export writes it for each of them. An
adapter of another trainer whose q_proj and k_proj, or gate_proj and up_proj, have different A's cannot be used.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from conf.schema.run import Run
from contract.faults import Fault
from trainer.megatron import adapters
from trainer.startup.console import say
from trainer.weights import mapping
from trainer.weights.atomic_folder import gather
from trainer.weights.exported import peft_format
from trainer.weights.merge import ADAPTER
from trainer.weights.released import enumerate_names


def install(config: Any, run: Run, bridge: Any) -> None:
    """Make the adapters of a new training start from model.adapter."""
    config.peft.start = partial(_fill, run, bridge, config.model)


def _fill(run: Run, bridge: Any, config: Any, model: Any) -> None:
    """Fill the adapters of a model from model.adapter. All ranks must call this."""
    assert run.model.adapter
    folder = Path(run.model.adapter).expanduser()
    start = StartingAdapter(folder, run.adapter.rank, bridge._model_bridge.mapping_registry(), config)
    adapters.fill(model, start.whole)
    start.require_all_used()
    say(f"the adapter starts from {folder}")


class StartingAdapter:
    """Matrices by Megatron's names; records which tensors of the file were used."""

    def __init__(self, folder: Path, rank: int, registry: Any, config: Any):
        self.folder, self.rank, self.registry, self.config = folder, rank, registry, config
        self.file = safe_open(str(folder / peft_format.WEIGHTS), "pt")
        self.names: set[str] = set(self.file.keys())
        self.used: set[str] = set()
        self.last: tuple[str, torch.Tensor] | None = None

    def whole(self, name: str, shape: list[int]) -> torch.Tensor:
        """Return the whole matrix A or B of a layer (and expert), before it is cut."""
        matrix = self._read(name)
        if list(matrix.shape) != shape:
            mismatch = f"{name} is {' x '.join(map(str, shape))}, and its {' x '.join(map(str, matrix.shape))}"
            raise Fault(f"model.adapter: {self.folder}: is of another model: {mismatch}")
        return matrix

    def _read(self, name: str) -> torch.Tensor:
        match = ADAPTER.fullmatch(name)
        assert match, name
        parts = mapping.parts(self.registry, f"{match['layer']}.weight{match['expert']}")
        if parts is None:
            raise Fault(f"model.adapter: {self.folder}: the release has no weight of {match['layer']}")
        if match["role"] == "linear_out":
            return self._joined({part.role: self._matrix(part, "B") for part in parts})
        first, *others = [self._matrix(part, "A") for part in parts]
        if any(not torch.equal(first, other) for other in others):
            named = " and ".join(part.name for part in parts)
            raise Fault(f"model.adapter: {self.folder}: the A's of {named} differ, but Megatron has one for all")
        return first

    def require_all_used(self) -> None:
        """Check that some rank used each tensor of the file."""
        if left := sorted(self.names - set().union(*gather(self.used))):
            raise Fault(f"model.adapter: {self.folder}: adapter.targets has no place for {enumerate_names(left)}")

    def _joined(self, matrices: dict[str | None, torch.Tensor]) -> torch.Tensor:
        """Stack the matrices in Megatron's order."""
        rows = sum(map(len, matrices.values()))
        joined, order = torch.empty(rows, next(iter(matrices.values())).shape[1]), torch.arange(rows)
        for role, matrix in matrices.items():
            joined[mapping.Part("", role).rows(order, self.config)] = matrix.float()
        return joined

    def _matrix(self, part: mapping.Part, which: str) -> torch.Tensor:
        """Return A or B of a released weight. PEFT stacks those of all experts of a layer."""
        released = part.name
        expert, stack = peft_format.EXPERT.match(released), peft_format.STACK.match(released)
        if stack and part.expert is not None:
            module, leaf, number = stack["module"], stack["leaf"], part.expert
        elif expert:
            module, leaf = f"{expert['layer']}.mlp.experts", peft_format.LEAVES[expert["leaf"]]
            number = int(expert["number"])
        else:
            return self._tensor(f"{peft_format.module(released)}.lora_{which}.weight", released)
        inner = f"{module}.base_layer.lora_{which}.weight"
        gated = leaf != "down" and peft_format.PREFIX + inner in self.names
        whole = self._tensor(inner if gated else f"{module}.lora_{which}.weight", released)
        if which == "A":
            return whole[number * self.rank : (number + 1) * self.rank]
        of_expert = whole.view(len(whole), self.rank, -1)[:, :, number]
        return of_expert.chunk(2)[("gate", "up").index(leaf)] if leaf in ("gate", "up") else of_expert

    def _tensor(self, key: str, released: str) -> torch.Tensor:
        name = peft_format.PREFIX + key
        if name not in self.names:
            problem = f"has nothing for {released}, which adapter.targets adapts"
            raise Fault(f"model.adapter: {self.folder}: {problem} ({name})")
        self.used.add(name)
        if self.last is None or self.last[0] != name:  # experts are read one after another
            self.last = name, self.file.get_tensor(name)
        return self.last[1]
