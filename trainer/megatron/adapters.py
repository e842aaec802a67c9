"""LoRA and DoRA as this project trains them: Megatron-Bridge's, made independent of how the model is cut.

Initial values. Bridge draws each rank's piece of A from that rank's random stream, so the adapter that a run starts
from depends on its layout and its device. Here the whole A of a layer is drawn on the CPU from a generator seeded by
the layer's name (and expert), and every rank keeps its piece: the same on 1 process and on 32 GPUs. B starts at zero;
only comparisons of layouts draw it too (SPREAD_OF_B), as zeros hide what B multiplies.

Experts. Bridge 0.6.2's adapter per expert is wrong under expert tensor parallelism, and nothing says so: on fc1 it
gathers the hidden values outside autograd, so A gets no gradient; on fc2 each rank multiplies only its own part of the
hidden values, and the dispatcher then adds up copies of the result. ExpertAdapter repairs both.

DoRA. Bridge takes the norm of a row-parallel weight over one rank's columns only; DoRALinear takes it over all. Bridge
does not mark the magnitudes' gradients as partial (row-parallel) or cut (column-parallel) over ranks either, and saves
those of a fused gate and up as each rank has them, so that a resume at another tp took gates' for ups'.

Sequence parallelism: trainer/patches/sequence_parallel.py.

Recompute. What is computed again gets no gradient, or fails, where its input needs none: in a first layer behind a
frozen embedding. Bridge sees to that for full recompute alone; _recompute_from_the_start does for single modules too.
Each can go when Bridge does the same; trainer/layouts.py and tests/trainer/test_train.py hold each.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import hashlib
import math
from dataclasses import dataclass

import torch
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.peft import dora, dora_layers, lora
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import nn

from trainer.patches import sequence_parallel, shared_experts

SPREAD_OF_B = 0.0  # as a part of A's; trainer/layouts.py and tests set another


@dataclass
class LoRA(lora.LoRA):
    seed: int = 0

    def __call__(self, model, training: bool = True):
        lora.GroupedExpertLinearAdapter = ExpertAdapter
        shared_experts.install()
        model = super().__call__(model, training)
        sequence_parallel.give_every_adapter_all_tokens(model)
        shared_experts.count_once(model)
        draw_initial_values(model, self.seed)
        _recompute_from_the_start(model)
        return model


@dataclass
class DoRA(dora.DoRA):
    seed: int = 0

    def __call__(self, model, training: bool = True):
        dora.DoRALinear, dora.ParallelLinearDoRAAdapter = DoRALinear, DoRAAdapter
        model = super().__call__(model, training)
        sequence_parallel.give_every_adapter_all_tokens(model)
        draw_initial_values(model, self.seed)
        for chunk in model if isinstance(model, list) else [model]:
            for module in chunk.modules():
                if isinstance(module, DoRALinear):
                    _ready_magnitude(module)
        _recompute_from_the_start(model)
        return model


def _recompute_from_the_start(model) -> None:
    """Make the embedding's output require a gradient, although no weight needs one of it."""
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if isinstance(module, LanguageModelEmbedding) and module.config.recompute_granularity == "selective":
                module.register_forward_hook(_needs_gradient)


def _needs_gradient(_module, _inputs, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _ready_magnitude(module: "DoRALinear") -> None:
    """Set the magnitudes, and mark how they lie over ranks: their gradients are summed and normed accordingly."""
    magnitude = module.adapter.weight_magnitude
    magnitude.data.copy_(module._get_weight_norm())
    if module.adapter.input_is_parallel:
        magnitude.sequence_parallel = module.to_wrap.config.sequence_parallel  # whole, each rank sees its tokens
    else:
        set_tensor_model_parallel_attributes(magnitude, True, 0, 1)


@torch.no_grad()
def draw_initial_values(model, seed: int) -> None:
    """Fill every A with its part of a Xavier-normal matrix that is drawn whole, and every B with zeros."""
    chunks = model if isinstance(model, list) else [model]
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            whole = _megatron_local_name_to_global(chunks, chunk.config, name, stage)
            if name.endswith(".adapter.linear_in.weight"):
                parameter.copy_(_piece(whole, parameter, seed))
            if name.endswith(".adapter.linear_out.weight"):
                parameter.zero_()
                if SPREAD_OF_B:
                    gated = chunk.config.gated_linear_unit and ".linear_fc1." in name
                    parameter.copy_(_piece(whole, parameter, seed, 2 if gated else 1) * SPREAD_OF_B)


def _piece(name: str, parameter, seed: int, parts: int = 1) -> torch.Tensor:
    """Piece that this rank holds of a matrix that is drawn whole.

    `parts` is the number of matrices, each of which is cut, that the parameter holds one below the other.
    """
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    ways = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
    if parameter.ndim == 2:
        dim = parameter.partition_dim
        return _cut(_draw(name, parameter, dim, ways, seed), dim, ways, group, parts)
    first = parallel_state.get_expert_model_parallel_rank() * len(parameter)
    dim = parameter.partition_dim - 1  # [experts, rank, in]: the cut is in the matrix behind the experts
    pieces = (
        _cut(_draw(f"{name}{first + i}", one, dim, ways, seed), dim, ways, group, parts)
        for i, one in enumerate(parameter)
    )
    return torch.stack(list(pieces))


def _draw(name: str, like, dim: int, ways: int, seed: int) -> torch.Tensor:
    shape = list(like.shape)
    shape[dim] *= ways
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randn(shape, generator=generator, device="cpu") * math.sqrt(2 / sum(shape))


def _cut(whole: torch.Tensor, dim: int, ways: int, group, parts: int) -> torch.Tensor:
    if ways == 1:
        return whole
    return torch.cat([part.chunk(ways, dim)[group.rank()] for part in whole.chunk(parts, dim)], dim)


class ExpertAdapter(GroupedExpertLinearAdapter):
    """One low-rank pair per expert, right also where each expert is cut over several ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.input_is_parallel and self.expert_tp_group is not None and self.expert_tp_group.size() > 1:
            self.activation = _Sum(self.expert_tp_group)  # fc2: between A and B, where Bridge puts its activation

    def _gather_along_last_dim(self, tensor):
        group = self.expert_tp_group
        if group is None or group.size() == 1:
            return tensor
        if not self.input_is_parallel:
            return mappings.all_gather_last_dim_from_tensor_parallel_region(tensor, group=group)
        # fc2: the dispatcher adds up the ranks' outputs, so a rank fills in its own columns and leaves the others 0.
        width = tensor.shape[-1]
        return nn.functional.pad(tensor, (group.rank() * width, (group.size() - 1 - group.rank()) * width))


class _Sum(nn.Module):
    """The sum over ranks, of values and of gradients: each rank holds a part of both."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        x = mappings.reduce_from_tensor_model_parallel_region(x, group=self.group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.group)


class DoRAAdapter(dora_layers.ParallelLinearDoRAAdapter):
    """DoRA's adapter.

    It saves the magnitudes of a fused gate and up as Bridge saves B: whole at any tp, gates before ups.
    """

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        state, key = super().sharded_state_dict(prefix, sharded_offsets, metadata), f"{prefix}weight_magnitude"
        if "linear_fc1" in self.base_linear_name and self.config.gated_linear_unit:
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class DoRALinear(dora_layers.DoRALinear):
    """DoRA whose norm covers the whole row of a weight that is cut over columns, and which leaves the bias alone."""

    def forward(self, x):
        output, bias = super().forward(x)
        inside = getattr(self.to_wrap, "bias", None)
        if bias is None and inside is not None and inside.numel() and self._adapter_enabled:
            # Bridge multiplies W x + b + B A x; the magnitudes of DoRA are those of the weight.
            output = output + inside * (1 - self.adapter.get_weight_magnitude() / self._get_weight_norm())
        # Bridge makes [1, tokens, width] of [tokens, width], which latent attention has where sequences are packed.
        return output.squeeze(0) if output.ndim > x.ndim else output, bias

    def _get_weight_norm(self):
        if not self.adapter.input_is_parallel:
            return super()._get_weight_norm()
        outer = mappings.gather_from_tensor_model_parallel_region(self.adapter.linear_out.weight.T).T
        weight = self.to_wrap.weight + self.scaling * outer @ self.adapter.linear_in.weight
        squares = weight.float().square().sum(1).detach()
        torch.distributed.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        return squares.sqrt().to(weight.dtype)
