"""Frozen RMS norms as one call of Transformer Engine's kernel.

A separate norm (of queries, of keys, before the experts) is one of Transformer Engine's operations. These are assembled
in every call, for fusion with others, so the host needs a third of a millisecond to start one kernel: three times per
layer of Qwen3, and again when the layer is recomputed. Here the same kernels are called directly, with bit-identical
results. Trained norms stay unchanged.
"""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportMissingImports=false

import functools

import torch

from trainer.startup import device


def install(model) -> None:
    """Replace the forward pass of every frozen RMS norm of the model, if a GPU is available."""
    if not device.has_gpu():
        return
    from transformer_engine.pytorch import RMSNorm

    for chunk in model if isinstance(model, list) else [model]:
        for norm in chunk.modules():
            if type(norm) is RMSNorm and not norm.weight.requires_grad:
                norm.forward = functools.partial(_forward, norm)


def _forward(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != norm.weight.dtype or torch.is_autocast_enabled():
        return type(norm).forward(norm, x)
    return _Norm.apply(x, norm.weight, norm.eps, norm.zero_centered_gamma, norm._sm_margins)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, epsilon, centered, margins):
        from transformer_engine.pytorch.constants import TE_DType
        from transformer_engine_torch import rmsnorm_fwd

        rows = x.contiguous().view(-1, len(weight))
        out, _, spread = rmsnorm_fwd(rows, weight, epsilon, None, None, TE_DType[x.dtype], margins["forward"], centered)
        ctx.save_for_backward(rows, spread, weight)
        ctx.options = margins["backward"], centered
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        from transformer_engine_torch import rmsnorm_bwd

        rows, spread, weight = ctx.saved_tensors
        out, _ = rmsnorm_bwd(gradient.contiguous().view(rows.shape), rows, spread, weight, *ctx.options)
        return out.view(gradient.shape), None, None, None, None
