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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.peft import dora as bridge_dora
from megatron.bridge.peft import lora as bridge_lora
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.core import parallel_state

from trainer.megatron import frozen_experts, frozen_norms, lean_adapters
from trainer.patches import dora, expert_adapters, recompute, sequence_parallel

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


def _set_magnitudes(model) -> None:
    """Set the magnitudes to the norms of the initial values, which were drawn after Bridge had set them."""
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if isinstance(module, DoRALinear):
                module.adapter.weight_magnitude.data.copy_(module._get_weight_norm())


@torch.no_grad()
def draw_initial_values(model, seed: int, init: str) -> None:
    """Fill every A with its part of a matrix that is drawn whole, and every B with zeros."""
    drawn = partial(_draw, seed, init)
    for whole, parameter, parts in _matrices(model):
        if whole.endswith(".adapter.linear_in.weight"):
            parameter.copy_(_piece(whole, parameter, drawn, parts))
        else:
            parameter.zero_()
            if SPREAD_OF_B:
                parameter.copy_(_piece(whole, parameter, drawn, parts) * SPREAD_OF_B)


@torch.no_grad()
def fill(model, matrix: Callable[[str, list[int]], torch.Tensor]) -> None:
    """Fill every A and B with this rank's part of a matrix, which `matrix` returns by name and shape."""
    for whole, parameter, parts in _matrices(model):
        parameter.copy_(_piece(whole, parameter, matrix, parts))


def _matrices(model) -> Iterator[tuple[str, Any, int]]:
    """Yield every A and B: its name in the whole model, the parameter, and how many matrices are stacked in it."""
    chunks = model if isinstance(model, list) else [model]
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if name.endswith((".adapter.linear_in.weight", ".adapter.linear_out.weight")):
                gated = chunk.config.gated_linear_unit and name.endswith(".linear_fc1.adapter.linear_out.weight")
                whole = _megatron_local_name_to_global(chunks, chunk.config, name, stage)
                yield whole, parameter, 2 if gated else 1


def _piece(name: str, parameter, matrix: Callable[[str, list[int]], torch.Tensor], parts: int) -> torch.Tensor:
    """Return this rank's part of the whole matrix `name`, which `matrix` makes.

    `parts` is the number of matrices stacked in the parameter; each of them is cut separately.
    """
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    ways = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
    if parameter.ndim == 2:
        dim = parameter.partition_dim
        return _cut(matrix(name, _whole_shape(parameter, dim, ways)), dim, ways, group, parts)
    first = parallel_state.get_expert_model_parallel_rank() * len(parameter)
    dim = parameter.partition_dim - 1  # [experts, rank, in]: `partition_dim` counts without the first axis
    pieces = [
        _cut(matrix(f"{name}{first + i}", _whole_shape(expert, dim, ways)), dim, ways, group, parts)
        for i, expert in enumerate(parameter)
    ]
    return torch.stack(pieces)


def _draw(seed: int, init: str, name: str, shape: list[int]) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    if init == "kaiming":  # as PEFT: kaiming_uniform_(a=sqrt(5)) of [rank, inputs]
        return (2 * torch.rand(shape, generator=generator, device="cpu") - 1) / math.sqrt(shape[1])
    return torch.randn(shape, generator=generator, device="cpu") * math.sqrt(2 / sum(shape))


def _whole_shape(like, dim: int, ways: int) -> list[int]:
    """Return the shape of the whole matrix; each rank holds a part of the shape of `like`."""
    shape = list(like.shape)
    shape[dim] *= ways
    return shape


def _cut(whole: torch.Tensor, dim: int, ways: int, group, parts: int) -> torch.Tensor:
    if ways == 1:
        return whole
    return torch.cat([part.chunk(ways, dim)[group.rank()] for part in whole.chunk(parts, dim)], dim)
