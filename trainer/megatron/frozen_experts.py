"""Grouped products of frozen experts without synchronization between host and GPU.

Transformer Engine's grouped product takes lists: every expert's weight and its number of tokens. With 128 experts the
host needs milliseconds to build such lists, for each of a layer's two products, in the forward pass, its recomputation
and the backward pass. The host also waits until the GPU knows the numbers, and meanwhile nothing is queued. torch's
grouped product reads on the GPU where each expert's tokens end, and takes the weights of a layer as one tensor. Frozen
weights are stacked into such a tensor in the first forward pass; each parameter keeps its name and becomes a view of
its part. Packed weights are unpacked into such a tensor for each product.

If one rank holds all experts, OneRank saves more: tokens are sorted by expert only once, and the numbers are not copied
to the host. Other code that needs the numbers, such as adapters of each expert, waits for the copy.

This requires bf16 on Hopper, for which torch has the kernel; tests set OF_TYPE to run in fp32 on a CPU. FP8 keeps
Transformer Engine's product.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportOptionalMemberAccess=false

import functools
from itertools import accumulate
from typing import Any

import torch
from megatron.core import jit
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import nn

from trainer.megatron.packed_base.weight import PackedWeight, Store
from trainer.startup import device

HOPPER = 9
OF_TYPE = torch.bfloat16


class Counts:
    """Number of tokens of each expert of a layer, in the order of the tokens."""

    def __init__(self, tokens: torch.Tensor | list[int]):
        self.tokens = tokens

    def tolist(self) -> "Counts":
        """Return itself: megatron-core calls this only to pass the result to the layers."""
        return self

    @functools.cached_property
    def on_host(self) -> list[int]:
        return self.tokens.tolist() if isinstance(self.tokens, torch.Tensor) else [*self.tokens]

    def ends(self, place: torch.device) -> torch.Tensor:
        """Return the cumulative number of tokens: for each expert, where its tokens end."""
        if isinstance(self.tokens, torch.Tensor) and self.tokens.device == place:
            return self._ends
        return ends(tuple(self.on_host), place)

    @functools.cached_property
    def _ends(self) -> torch.Tensor:
        return self.tokens.cumsum(0, dtype=torch.int32)

    def expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the expert of each row."""
        if (kept := vars(self).get("_expert")) is None:
            numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            kept = self._expert = torch.searchsorted(self.ends(rows.device), numbers, right=True)
        return kept


@functools.lru_cache(maxsize=256)
def ends(sizes: tuple[int, ...], place: torch.device) -> torch.Tensor:
    """Return where each expert's tokens end. The cache serves the layer's other products and its recomputation."""
    offsets = torch.tensor([*accumulate(sizes)], dtype=torch.int32)
    return offsets.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else offsets


def install(model) -> None:
    """Use this product in every layer whose experts are frozen and that fulfils the conditions."""
    if not has_kernel():
        return
    for chunk in model if isinstance(model, list) else [model]:
        for moe in chunk.modules():
            if isinstance(moe, MoELayer) and isinstance(moe.experts, TEGroupedMLP):
                _take(moe)


def _take(layer: MoELayer) -> None:
    experts, dispatcher = layer.experts, layer.token_dispatcher
    grouped = [getattr(product, "to_wrap", product) for product in (experts.linear_fc1, experts.linear_fc2)]
    if layer.config.fp8 or not all(_fits(product) for product in grouped):
        return
    for product in grouped:
        product.forward = functools.partial(_forward, product)
    experts._apply_bias = _add_bias
    plain = type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.shared_experts is None
    if plain and (dispatcher.ep_size, dispatcher.tp_size) == (1, 1) and not dispatcher.drop_and_pad:
        dispatcher.__class__ = OneRank


def _fits(grouped: nn.Module) -> bool:
    weights = [grouped.get_parameter(f"weight{i}") for i in range(grouped.num_gemms)]
    return all(
        type(weight) in (nn.Parameter, PackedWeight)
        and weight.dtype == OF_TYPE
        and not weight.requires_grad
        and not any(n % 8 for n in weight.shape)
        for weight in weights
    )


def has_kernel() -> bool:
    return device.has_gpu() and torch.cuda.get_device_capability()[0] == HOPPER


def _forward(layer: nn.Module, x: torch.Tensor, counts: Counts | list[int]) -> tuple[torch.Tensor, Any]:
    """Replace TEGroupedLinear.forward."""
    counts = counts if isinstance(counts, Counts) else Counts(counts)
    first = layer.get_parameter("weight0")
    weight = first.store if isinstance(first, PackedWeight) else stacked(layer, "weight")
    output = Product.apply(x, weight, counts.ends(x.device))
    if not layer.use_bias:
        return output, None
    bias = stacked(layer, "bias")
    if layer.te_return_bias:
        return output, bias
    return output.add_(bias.index_select(0, counts.expert(x))), None


@torch.no_grad()
def stacked(layer: nn.Module, name: str) -> torch.Tensor:
    """Return a layer's weights, or its biases, as one tensor; each parameter is a view of its part."""
    first, kept = layer.get_parameter(f"{name}0"), vars(layer).get(f"stacked_{name}")
    if kept is None or kept.data_ptr() != first.data_ptr():
        every = [layer.get_parameter(f"{name}{i}") for i in range(layer.num_gemms)]
        kept = torch.stack([parameter.data for parameter in every])
        for parameter, part in zip(every, kept, strict=True):
            parameter.data = part
        vars(layer)[f"stacked_{name}"] = kept
    return kept


class Product(torch.autograd.Function):
    """Multiply each expert's tokens by its weight.

    The weight of an expert without tokens gets a zero gradient, which the kernel leaves out.
    """

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.packed = weight if isinstance(weight, Store) else None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, None if ctx.packed else weight, ends)
        return nn.functional.grouped_mm(x, _whole(weight).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, ends = ctx.saved_tensors
        gradient, of_weight = gradient.contiguous(), None
        if ctx.needs_input_grad[1]:
            of_weight = nn.functional.grouped_mm(gradient.t(), x, offs=ends)
            has_tokens = ends.diff(prepend=ends.new_zeros(1)) > 0
            of_weight = of_weight.where(has_tokens[:, None, None], of_weight.new_zeros(()))
        return nn.functional.grouped_mm(gradient, _whole(ctx.packed or weight), offs=ends), of_weight, None


def _whole(weight: torch.Tensor | Store) -> torch.Tensor:
    return weight.unpack() if isinstance(weight, Store) else weight


def _add_bias(output, bias, counts: Counts | list[int], probabilities):
    """Add each token's bias, weighted like its output, as TEGroupedMLP._apply_bias does expert by expert."""
    if bias is None:
        return output
    counts = counts if isinstance(counts, Counts) else Counts(counts)
    rows = output.view(-1, output.shape[-1])
    return _weighted_sum()(rows, bias, counts.expert(rows), probabilities).view(output.shape)


@functools.cache
def _weighted_sum():
    """Return the function, compiled to one kernel if a compiler is available."""

    @jit.jit_fuser
    def weighted_sum(rows, bias, expert, probabilities):
        return (rows + bias[expert] * probabilities).to(rows.dtype)

    return weighted_sum


class OneRank(MoEAlltoAllTokenDispatcher):
    """Dispatcher for a rank that holds every expert: tokens are sorted once, and their numbers stay on the GPU."""

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        counts, self.tokens_per_expert = Counts(self.tokens_per_expert), None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states):
        return hidden_states
