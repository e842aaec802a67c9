"""Adapters of each expert of a layer, as one grouped product over all, added where the layer's output stands.

Megatron-Bridge's own copies its input together, sends the experts' numbers of tokens to the GPU in each of a layer's
products, and picks the weights of experts that have tokens: the host waits for the GPU three times in each layer, and
two passes over the output scale and add. Where every expert has tokens none of that is needed; nor where the numbers of
tokens stay on the GPU (frozen_experts.py). Where one has none, or its products are no bf16 on a GPU (FP8, experts that
are cut, sizes that are no multiple of 8), it is Bridge's.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from torch import nn

from trainer.megatron.frozen_experts import Counts
from trainer.patches.expert_adapters import ExpertAdapter


class LeanExperts(LoRALinear):
    """Grouped layer with an adapter for each expert."""

    def forward(self, x, *args, **kwargs):
        output, bias, seen = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        if isinstance(args[0], Counts) and fits(self.adapter, seen):
            return _Add.apply(output, grouped(self.adapter, seen, args[0])), bias
        args = (args[0].on_host, *args[1:]) if isinstance(args[0], Counts) else args
        sizes = self.adapter._extract_expert_splits(args, kwargs)
        if not is_grouped(self.adapter, seen, sizes):
            return output + self.adapter(seen.contiguous(), *args, **kwargs).reshape(output.shape), bias
        return _Add.apply(output, grouped(self.adapter, seen, Counts(sizes))), bias


def is_grouped(adapter: ExpertAdapter, x, sizes: list[int]) -> bool:
    return all(sizes) and fits(adapter, x)


def fits(adapter: ExpertAdapter, x) -> bool:
    whole = adapter.expert_tp_group is None or adapter.expert_tp_group.size() == 1
    return whole and not adapter._is_te_fp8_enabled() and adapter._can_use_grouped_mm(x)


def grouped(adapter: ExpertAdapter, x, counts: Counts):
    """The adapters' part of the layer's output."""
    found = counts.ends(x.device)
    hidden = _Product.apply(adapter.dropout(x), adapter.linear_in(), found)
    return _Product.apply(hidden * (adapter.alpha / adapter.dim), adapter.linear_out(), found)


class _Product(torch.autograd.Function):
    """Each expert's tokens times its weight. The kernel writes no gradient for an expert without tokens: it is 0."""

    @staticmethod
    def forward(ctx, x, weight, found):
        ctx.save_for_backward(x, weight, found)
        return nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=found)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, found = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_weight = nn.functional.grouped_mm(gradient.t(), x, offs=found)
        has_tokens = found.diff(prepend=found.new_zeros(1)) > 0
        of_weight = of_weight.where(has_tokens[:, None, None], of_weight.new_zeros(()))
        return nn.functional.grouped_mm(gradient, weight, offs=found), of_weight, None


class _Add(torch.autograd.Function):
    """Sum of `output` and `part`, made where `output` stands; see lean_adapters.py."""

    @staticmethod
    def forward(ctx, output, part):
        return output.contiguous().add_(part.view(output.shape))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient
