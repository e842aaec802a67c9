"""Adapters of each expert of a layer, as one grouped product over all experts, added to the layer's output in place.

Megatron-Bridge's adapters concatenate their input, copy the experts' token counts to the GPU for each of a layer's
products, and select the weights of experts that have tokens. The host therefore waits for the GPU three times per
layer, and two passes over the output scale and add. None of that is needed if every expert has tokens, or if the token
counts stay on the GPU (frozen_experts.py). Bridge's product is used if an expert has no tokens and the counts are on
the host, or if the grouped product is impossible (not bf16 on a GPU, FP8, experts that are cut, sizes that are not
multiples of 8).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false

import torch
from megatron.bridge.peft.lora_layers import LoRALinear

from trainer.megatron.frozen_experts import Counts, Product
from trainer.patches.expert_adapters import ExpertAdapter


class LeanExperts(LoRALinear):
    """Grouped layer with an adapter for each expert."""

    def forward(self, x, *args, **kwargs):
        output, bias, adapter_input = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        if isinstance(args[0], Counts) and fits(self.adapter, adapter_input):
            return _Add.apply(output, grouped(self.adapter, adapter_input, args[0])), bias
        args = (args[0].on_host, *args[1:]) if isinstance(args[0], Counts) else args
        sizes = self.adapter._extract_expert_splits(args, kwargs)
        if not is_grouped(self.adapter, adapter_input, sizes):
            return output + self.adapter(adapter_input.contiguous(), *args, **kwargs).reshape(output.shape), bias
        return _Add.apply(output, grouped(self.adapter, adapter_input, Counts(sizes))), bias


def is_grouped(adapter: ExpertAdapter, x, sizes: list[int]) -> bool:
    return all(sizes) and fits(adapter, x)


def fits(adapter: ExpertAdapter, x) -> bool:
    whole = adapter.expert_tp_group is None or adapter.expert_tp_group.size() == 1
    return whole and not adapter._is_te_fp8_enabled() and adapter._can_use_grouped_mm(x)


def grouped(adapter: ExpertAdapter, x, counts: Counts):
    """Return the adapters' part of the layer's output."""
    ends = counts.ends(x.device)
    hidden = Product.apply(adapter.dropout(x), adapter.linear_in(), ends)
    return Product.apply(hidden * (adapter.alpha / adapter.dim), adapter.linear_out(), ends)


class _Add(torch.autograd.Function):
    """Compute `output` + `part` in place of `output`; see lean_adapters.py."""

    @staticmethod
    def forward(ctx, output, part):
        return output.contiguous().add_(part.view(output.shape))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient
