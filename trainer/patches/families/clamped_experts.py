"""Patch for experts whose gated activation is clamped (gpt-oss): one kernel each way, and no number that is sent.

Megatron-core clamps both halves in kernels of their own, puts them together again, and sends the offset of the linear
half to the GPU in each layer, from memory of the host that is not pinned: the host waits until the GPU has done all
that it was asked for, and then nothing is queued. On an H100 it waited so for a millisecond in each layer.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/fusions/fused_bias_geglu.py
Can go when weighted_bias_quick_geglu_impl makes no tensor of linear_offset.
"""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import functools

import torch

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}
SLOPE = 1.702  # of the sigmoid that stands for GELU


def install() -> None:
    """Have experts activated so, in this process, where they are clamped and have added their bias before."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.transformer.moe import experts

    usual = experts.weighted_bias_quick_geglu_impl
    if getattr(usual, "clamps_at_once", False):
        return

    @functools.wraps(usual)
    def activate(x, bias, weights, fp8_input_store=False, linear_offset=0.0, clamp_value=None):
        if bias is not None or fp8_input_store or clamp_value is None:
            return usual(x, bias, weights, fp8_input_store, linear_offset, clamp_value)
        return Activation.apply(x.view(-1, x.shape[-1]), weights, linear_offset, clamp_value).view(*x.shape[:-1], -1)

    activate.clamps_at_once = True
    experts.weighted_bias_quick_geglu_impl = activate


class Activation(torch.autograd.Function):
    """Each token's gated activation, times its weight."""

    @staticmethod
    def forward(ctx, x, weights, offset: float, limit: float):
        ctx.save_for_backward(x, weights)
        ctx.numbers = offset, limit
        return _compiled()[0](x, weights, offset, limit)

    @staticmethod
    def backward(ctx, gradient):
        x, weights = ctx.saved_tensors
        return (*_compiled()[1](gradient, x, weights, *ctx.numbers), None, None)


@functools.cache
def _compiled():
    from megatron.core import jit

    return jit.jit_fuser(_activated), jit.jit_fuser(_gradients)


def _activated(x, weights, offset: float, limit: float):
    gate, linear = torch.chunk(x, 2, -1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return (gate * torch.sigmoid(SLOPE * gate) * (linear + offset) * weights).to(x.dtype)


def _gradients(gradient, x, weights, offset: float, limit: float):
    given, other = torch.chunk(x, 2, -1)
    gate, linear = given.clamp(max=limit), other.clamp(-limit, limit)
    share = torch.sigmoid(SLOPE * gate)
    weighted = gradient * weights
    of_gate = weighted * share * (1 + SLOPE * gate * (1 - share)) * (linear + offset)
    of_linear = weighted * gate * share
    zero = torch.zeros_like(of_gate)
    of_gate = torch.where(given <= limit, of_gate, zero)
    of_linear = torch.where((other >= -limit) & (other <= limit), of_linear, zero)
    of_weights = (gate * share * (linear + offset) * gradient.to(weights.dtype)).sum(-1, keepdim=True)
    return torch.cat((of_gate, of_linear), -1).to(x.dtype), of_weights.to(weights.dtype)
