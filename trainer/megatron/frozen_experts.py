"""Products of frozen experts as one kernel whose sizes stay on the GPU, so that the host neither counts nor waits.

Transformer Engine's grouped product takes a list of every expert's weight and of its number of tokens. With 128 experts
the host needs milliseconds to make and keep such lists, in each of a layer's two products, forward, again and backward;
and it has waited for the GPU to know the numbers, so nothing is queued meanwhile. torch's grouped product reads where
each expert's tokens end on the GPU, and the weights of a layer as one tensor. Frozen ones are laid behind one another
in the first forward pass; each stays a parameter of its own name, a view of its part.

On one rank of experts there is more to leave out (OneRank): tokens that are sorted by expert already are sorted no
second time, and the numbers do not come to the host. What else asks for them (an adapter of each expert) waits.

It is for bf16 on Hopper, where torch has the kernel; OF_TYPE lets tests have it in fp32 on a CPU. Packed weights and
FP8 stay Transformer Engine's.
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

from trainer.startup import device

HOPPER = 9
OF_TYPE = torch.bfloat16


class Counts:
    """Numbers of tokens of a layer's experts, in the order of the tokens."""

    def __init__(self, tokens: torch.Tensor | list[int]):
        self.tokens = tokens

    def tolist(self) -> "Counts":
        """Itself: megatron-core asks for a list, only to hand it on to the layers."""
        return self

    @functools.cached_property
    def on_host(self) -> list[int]:
        return self.tokens.tolist() if isinstance(self.tokens, torch.Tensor) else [*self.tokens]

    def ends(self, place: torch.device) -> torch.Tensor:
        """Number of tokens of each expert and those before it."""
        if isinstance(self.tokens, torch.Tensor) and self.tokens.device == place:
            return self._ends
        return ends(tuple(self.on_host), place)

    @functools.cached_property
    def _ends(self) -> torch.Tensor:
        return self.tokens.cumsum(0, dtype=torch.int32)

    def expert(self, rows: torch.Tensor) -> torch.Tensor:
        """The expert of each row."""
        if (kept := vars(self).get("_expert")) is None:
            numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
            kept = self._expert = torch.searchsorted(self.ends(rows.device), numbers, right=True)
        return kept


@functools.lru_cache(maxsize=256)
def ends(sizes: tuple[int, ...], place: torch.device) -> torch.Tensor:
    """Ends of each expert's tokens. Kept for a layer's other products, and for when it is computed again."""
    found = torch.tensor([*accumulate(sizes)], dtype=torch.int32)
    return found.pin_memory().to(place, non_blocking=True) if place.type == "cuda" else found


def install(model) -> None:
    """Have this product made wherever a layer's experts are frozen and can have it."""
    if not has_kernel():
        return
    for chunk in model if isinstance(model, list) else [model]:
        for layer in chunk.modules():
            if isinstance(layer, MoELayer) and isinstance(layer.experts, TEGroupedMLP):
                _take(layer)


def _take(layer: MoELayer) -> None:
    experts, dispatcher = layer.experts, layer.token_dispatcher
    grouped = [getattr(one, "to_wrap", one) for one in (experts.linear_fc1, experts.linear_fc2)]
    if layer.config.fp8 or not all(_fits(one) for one in grouped):
        return
    for one in grouped:
        one.forward = functools.partial(_forward, one)
    experts._apply_bias = _add_bias
    plain = type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.shared_experts is None
    if plain and (dispatcher.ep_size, dispatcher.tp_size) == (1, 1) and not dispatcher.drop_and_pad:
        dispatcher.__class__ = OneRank


def _fits(grouped: nn.Module) -> bool:
    weights = [grouped.get_parameter(f"weight{i}") for i in range(grouped.num_gemms)]
    return all(
        type(one) is nn.Parameter
        and one.dtype == OF_TYPE
        and not one.requires_grad
        and not any(n % 8 for n in one.shape)
        for one in weights
    )


def has_kernel() -> bool:
    return device.has_gpu() and torch.cuda.get_device_capability()[0] == HOPPER


def _forward(layer: nn.Module, x: torch.Tensor, counts: Counts | list[int]) -> tuple[torch.Tensor, Any]:
    """What TEGroupedLinear.forward does."""
    counts = counts if isinstance(counts, Counts) else Counts(counts)
    output = _Product.apply(x, stacked(layer, "weight"), counts.ends(x.device))
    if not layer.use_bias:
        return output, None
    bias = stacked(layer, "bias")
    if layer.te_return_bias:
        return output, bias
    return output.add_(bias.index_select(0, counts.expert(x))), None


@torch.no_grad()
def stacked(layer: nn.Module, name: str) -> torch.Tensor:
    """A layer's weights, or its biases, as one tensor of which each is a part."""
    first, kept = layer.get_parameter(f"{name}0"), vars(layer).get(f"stacked_{name}")
    if kept is None or kept.data_ptr() != first.data_ptr():
        every = [layer.get_parameter(f"{name}{i}") for i in range(layer.num_gemms)]
        kept = torch.stack([one.data for one in every])
        for one, part in zip(every, kept, strict=True):
            one.data = part
        vars(layer)[f"stacked_{name}"] = kept
    return kept


class _Product(torch.autograd.Function):
    """Each expert's tokens times its frozen weight."""

    @staticmethod
    def forward(ctx, x, weight, ends):
        ctx.save_for_backward(weight, ends)
        return nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, gradient):
        weight, ends = ctx.saved_tensors
        return nn.functional.grouped_mm(gradient.contiguous(), weight, offs=ends), None, None


def _add_bias(output, bias, counts: Counts | list[int], probabilities):
    """What TEGroupedMLP._apply_bias does expert by expert: add each token's bias, weighted as its output is."""
    if bias is None:
        return output
    counts = counts if isinstance(counts, Counts) else Counts(counts)
    rows = output.view(-1, output.shape[-1])
    return _weighted_sum()(rows, bias, counts.expert(rows), probabilities).view(output.shape)


@functools.cache
def _weighted_sum():
    """One kernel, where there is a compiler."""

    @jit.jit_fuser
    def weighted_sum(rows, bias, expert, probabilities):
        return (rows + bias[expert] * probabilities).to(rows.dtype)

    return weighted_sum


class OneRank(MoEAlltoAllTokenDispatcher):
    """Dispatcher of a rank that has every expert: tokens are sorted once, and their numbers stay where they are."""

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        return tokens_per_expert

    def dispatch_postprocess(self, global_input_tokens, global_probs):
        counts, self.tokens_per_expert = Counts(self.tokens_per_expert), None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states):
        return hidden_states
