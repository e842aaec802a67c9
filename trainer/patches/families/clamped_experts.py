"""Patch for experts with a clamped gated activation (gpt-oss): one kernel forward, one backward, and no copy to the
GPU.

Megatron-core clamps both halves in separate kernels, concatenates them, and copies the offset of the linear half to the
GPU in each layer, from host memory that is not pinned. The host therefore waits until the GPU has finished all queued
work, and then the queue is empty: a millisecond per layer on an H100. Remove when weighted_bias_quick_geglu_impl makes
no tensor of linear_offset.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/fusions/fused_bias_geglu.py
"""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import functools

import torch

from trainer.patches import versions

SLOPE = 1.702  # of the sigmoid that approximates GELU


def install() -> None:
    """Replace the activation of experts in this process, if it is clamped and the bias was added before."""
    versions.check(__name__)
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
    raw_gate, raw_linear = torch.chunk(x, 2, -1)
    gate, linear = raw_gate.clamp(max=limit), raw_linear.clamp(-limit, limit)
    share = torch.sigmoid(SLOPE * gate)
    weighted = gradient * weights
    of_gate = weighted * share * (1 + SLOPE * gate * (1 - share)) * (linear + offset)
    of_linear = weighted * gate * share
    zero = torch.zeros_like(of_gate)
    of_gate = torch.where(raw_gate <= limit, of_gate, zero)
    of_linear = torch.where((raw_linear >= -limit) & (raw_linear <= limit), of_linear, zero)
    of_weights = (gate * share * (linear + offset) * gradient.to(weights.dtype)).sum(-1, keepdim=True)
    return torch.cat((of_gate, of_linear), -1).to(x.dtype), of_weights.to(weights.dtype)
