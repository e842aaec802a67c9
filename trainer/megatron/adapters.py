"""LoRA and DoRA as this project trains them: Megatron-Bridge's, made independent of how the model is cut.

Initial values. Bridge draws each rank's piece of A from that rank's random stream, so the adapter that a run starts
from depends on its layout and its device. Here the whole A of a layer is drawn on the CPU from a generator seeded by
the layer's name (and expert), and every rank keeps its piece: the same on 1 process and on 32 GPUs. adapter.init names
the distribution: Bridge's or PEFT's. B starts at zero; only comparisons of layouts draw it too (SPREAD_OF_B), as zeros
hide what B multiplies.

What they cost more than they have to is left out by lean_adapters.py. What else Bridge's adapters get wrong is repaired
in trainer/patches: expert_adapters.py, shared_experts.py, dora.py, sequence_parallel.py and recompute.py.
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
from trainer.patches import dora, expert_adapters, recompute, sequence_parallel, shared_experts

SPREAD_OF_B = 0.0  # as a part of A's; benchmarks/layouts.py and tests set another


@dataclass
class LoRA(bridge_lora.LoRA):
    seed: int = 0
    init: str = "xavier"
    lean: bool = True
    start = None  # no field: fills adapters that do not start as drawn (model.adapter)

    def __call__(self, model, training: bool = True):
        expert_adapters.install()
        if self.lean:
            lean_adapters.install()
            shared_experts.sum_copies_once_a_step()
        else:
            shared_experts.install()
        model = super().__call__(model, training)
        if self.lean:
            frozen_experts.install(model)
            frozen_norms.install(model)
        else:
            sequence_parallel.give_every_adapter_all_tokens(model)
        shared_experts.count_once(model)
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
    """Set the magnitudes to the norms of what has been drawn since Bridge set them."""
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
    """Fill every A and B with this rank's piece of the matrix of its name and shape."""
    for whole, parameter, parts in _matrices(model):
        parameter.copy_(_piece(whole, parameter, lambda name, *cut: matrix(name, _whole_shape(*cut)), parts))


def _matrices(model) -> Iterator[tuple[str, Any, int]]:
    """Every A and B with its name in the whole model, and of how many matrices below one another it consists."""
    chunks = model if isinstance(model, list) else [model]
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if name.endswith((".adapter.linear_in.weight", ".adapter.linear_out.weight")):
                gated = chunk.config.gated_linear_unit and name.endswith(".linear_fc1.adapter.linear_out.weight")
                whole = _megatron_local_name_to_global(chunks, chunk.config, name, stage)
                yield whole, parameter, 2 if gated else 1


def _piece(name: str, parameter, matrix: Callable[..., torch.Tensor], parts: int = 1) -> torch.Tensor:
    """Piece that this rank holds of a matrix that is made whole, of the name.

    `parts` is the number of matrices, each of which is cut, that the parameter holds one below the other.
    """
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    ways = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
    if parameter.ndim == 2:
        dim = parameter.partition_dim
        return _cut(matrix(name, parameter, dim, ways), dim, ways, group, parts)
    first = parallel_state.get_expert_model_parallel_rank() * len(parameter)
    dim = parameter.partition_dim - 1  # [experts, rank, in]: the cut is in the matrix behind the experts
    pieces = (
        _cut(matrix(f"{name}{first + i}", one, dim, ways), dim, ways, group, parts) for i, one in enumerate(parameter)
    )
    return torch.stack(list(pieces))


def _draw(seed: int, init: str, name: str, like, dim: int, ways: int) -> torch.Tensor:
    shape = _whole_shape(like, dim, ways)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    if init == "kaiming":  # PEFT's: kaiming_uniform_(a=sqrt(5)) of [rank, inputs]
        return (2 * torch.rand(shape, generator=generator, device="cpu") - 1) / math.sqrt(shape[1])
    return torch.randn(shape, generator=generator, device="cpu") * math.sqrt(2 / sum(shape))


def _whole_shape(like, dim: int, ways: int) -> list[int]:
    """Shape of the matrix of which a rank holds a piece like this one."""
    shape = list(like.shape)
    shape[dim] *= ways
    return shape


def _cut(whole: torch.Tensor, dim: int, ways: int, group, parts: int) -> torch.Tensor:
    if ways == 1:
        return whole
    return torch.cat([part.chunk(ways, dim)[group.rank()] for part in whole.chunk(parts, dim)], dim)
