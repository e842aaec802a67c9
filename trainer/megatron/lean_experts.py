"""Adapters of each expert of a layer, as one grouped product over all, added where the layer's output stands.

Megatron-Bridge's own copies its input together, sends the experts' numbers of tokens to the GPU in each of a layer's
products, and picks the weights of experts that have tokens: the host waits for the GPU three times in each layer, and
two passes over the output scale and add. Where every expert has tokens none of that is needed. Where one has none, or
its products are no bf16 on a GPU (FP8, experts that are cut, sizes that are no multiple of 8), it is Bridge's.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false

import functools
from itertools import accumulate

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from torch import nn

from trainer.patches.expert_adapters import ExpertAdapter


class LeanExperts(LoRALinear):
    """Grouped layer with an adapter for each expert."""

    def forward(self, x, *args, **kwargs):
        output, bias, seen = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        sizes = self.adapter._extract_expert_splits(args, kwargs)
        if not is_grouped(self.adapter, seen, sizes):
            return output + self.adapter(seen.contiguous(), *args, **kwargs).reshape(output.shape), bias
        return _Add.apply(output, grouped(self.adapter, seen, sizes)), bias


def is_grouped(adapter: ExpertAdapter, x, sizes: list[int]) -> bool:
    whole = adapter.expert_tp_group is None or adapter.expert_tp_group.size() == 1
    return whole and all(sizes) and not adapter._is_te_fp8_enabled() and adapter._can_use_grouped_mm(x)


def grouped(adapter: ExpertAdapter, x, sizes: list[int]):
    """The adapters' part of the layer's output."""
    ends = _ends(tuple(sizes), x.device)
    hidden = nn.functional.grouped_mm(adapter.dropout(x), adapter.linear_in().transpose(1, 2), offs=ends)
    hidden = hidden * (adapter.alpha / adapter.dim)
    return nn.functional.grouped_mm(hidden, adapter.linear_out().transpose(1, 2), offs=ends)


@functools.lru_cache(maxsize=256)
def _ends(sizes: tuple[int, ...], device: torch.device):
    """Where each expert's tokens end. Kept for a layer's other products, and for when it is computed again."""
    found = torch.tensor([*accumulate(sizes)], dtype=torch.int32)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


class _Add(torch.autograd.Function):
    """Sum of `output` and `part`, made where `output` stands; see lean_adapters.py."""

    @staticmethod
    def forward(ctx, output, part):
        return output.contiguous().add_(part.view(output.shape))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient
