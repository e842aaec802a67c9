"""LoRA and DoRA: Megatron-Bridge's classes, with initial values that do not depend on the layout.

Initial values. Bridge draws each rank's part of A from that rank's random stream, so the initial adapter depends on the
layout and the device. Here the whole A of a layer is drawn on the CPU, from a generator seeded by the layer's name (and
expert), and each rank keeps its part. 1 process and 32 GPUs therefore start from the same adapter. adapter.init selects
the distribution: Bridge's or PEFT's. B starts at zero. Comparisons of layouts draw B too (SPREAD_OF_B), because zeros
would hide errors in the factor of B.

lean_adapters.py replaces the expensive parts of Bridge's adapters. Bugs of Bridge's adapters are fixed in
trainer/patches: expert_adapters.py, dora.py, sequence_parallel.py and recompute.py.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.peft import dora as bridge_dora
from megatron.bridge.peft import lora as bridge_lora
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.core import parallel_state

from trainer.megatron import frozen_experts, frozen_norms, lean_adapters
from trainer.patches import dora, expert_adapters, recompute, sequence_parallel

Matrix = Callable[[str, list[int]], torch.Tensor]  # makes the whole matrix of a name and a shape
SPREAD_OF_B = 0.0  # B's spread relative to A's; benchmarks/layouts.py and tests set another value


@dataclass
class LoRA(bridge_lora.LoRA):
    seed: int = 0
    init: str = "xavier"
    lean: bool = True
    start = None  # not a field: fills adapters that continue an existing one (model.adapter)

    def __call__(self, model, training: bool = True):
        expert_adapters.install()
        if self.lean:
            lean_adapters.install()
            expert_adapters.sum_copies_once_a_step()
        else:
            expert_adapters.install_shared()
        model = super().__call__(model, training)
        if self.lean:
            frozen_experts.install(model)
            frozen_norms.install(model)
            _name_sections(model)
        else:
            sequence_parallel.give_every_adapter_all_tokens(model)
        expert_adapters.count_once(model)
        draw_initial_values(model, self.seed, self.init)
        if self.start:
            self.start(model)
        recompute.start_from_the_embedding(model)
        return model

    def transform(self, module, name: str | None = None, prefix: str | None = None):
        return lean_adapters.with_lean_adapter(super().transform(module, name, prefix))


@dataclass
class DoRA(bridge_dora.DoRA):
    seed: int = 0
    init: str = "xavier"

    def __call__(self, model, training: bool = True):
        dora.install()
        model = super().__call__(model, training)
        sequence_parallel.give_every_adapter_all_tokens(model)
        draw_initial_values(model, self.seed, self.init)
        _set_magnitudes(model)
        dora.mark_magnitudes(model)
        recompute.start_from_the_embedding(model)
        return model


def _name_sections(model) -> None:
    """Let the adapters of gated delta nets know the sections of their layers, which are cut section by section."""
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            matrix = getattr(getattr(getattr(module, "in_proj", None), "adapter", None), "linear_out", None)
            if isinstance(matrix, lean_adapters.Matrix):
                matrix.sections = dict(zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True))
                matrix.weight.sections = module.in_proj_split_sections


def _set_magnitudes(model) -> None:
    """Set the magnitudes to the norms of the initial values, which were drawn after Bridge had set them."""
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if isinstance(module, DoRALinear):
                module.adapter.weight_magnitude.data.copy_(module._get_weight_norm())


def draw_initial_values(model, seed: int, init: str) -> None:
    """Fill every A with its part of a matrix that is drawn whole, and every B with zeros."""

    def matrix(name: str, shape: list[int]) -> torch.Tensor:
        spread = 1.0 if ".adapter.linear_in." in name else SPREAD_OF_B
        return draw(seed, init, name, shape) * spread if spread else torch.zeros(shape)

    fill(model, matrix)


@torch.no_grad()
def fill(model, matrix: Matrix) -> None:
    """Fill every A and B with this rank's part of a matrix, which `matrix` returns by name and shape."""
    for whole, parameter, sections in _matrices(model):
        parameter.copy_(_piece(whole, parameter, matrix, sections))


def _matrices(model) -> Iterator[tuple[str, Any, Sequence[int]]]:
    """Yield every A and B: its name in the whole model, the parameter, and the lengths that are cut separately."""
    chunks = model if isinstance(model, list) else [model]
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if name.endswith((".adapter.linear_in.weight", ".adapter.linear_out.weight")):
                gated = chunk.config.gated_linear_unit and name.endswith(".linear_fc1.adapter.linear_out.weight")
                whole = _megatron_local_name_to_global(chunks, chunk.config, name, stage)
                length = parameter.shape[parameter.partition_dim]
                yield whole, parameter, getattr(parameter, "sections", [length // 2] * 2 if gated else [length])


def _piece(name: str, parameter, matrix: Matrix, sections: Sequence[int]) -> torch.Tensor:
    """Return this rank's part of the whole matrix `name`, which `matrix` makes.

    `sections` are the lengths of the parts of the parameter that are cut separately, such as gate and up.
    """
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    ways = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1

    def piece(name: str, own: torch.Tensor, dim: int) -> torch.Tensor:
        shape = list(own.shape)
        shape[dim] *= ways
        whole = matrix(name, shape)
        if ways == 1:
            return whole
        parts = whole.split([length * ways for length in sections], dim)
        return torch.cat([part.chunk(ways, dim)[group.rank()] for part in parts], dim)

    if parameter.ndim == 2:
        return piece(name, parameter, parameter.partition_dim)
    first = parallel_state.get_expert_model_parallel_rank() * len(parameter)
    dim = parameter.partition_dim - 1  # [experts, rank, in]: `partition_dim` counts without the first axis
    return torch.stack([piece(f"{name}{first + i}", expert, dim) for i, expert in enumerate(parameter)])


def draw(seed: int, init: str, name: str, shape: list[int]) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    if init == "kaiming":  # as PEFT: kaiming_uniform_(a=sqrt(5)) of [rank, inputs]
        return (2 * torch.rand(shape, generator=generator, device="cpu") - 1) / math.sqrt(shape[1])
    return torch.randn(shape, generator=generator, device="cpu") * math.sqrt(2 / sum(shape))
