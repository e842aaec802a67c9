"""The gradient of the residual past a norm, added by the norm's backward kernel.

A layer's input takes two paths, through a norm and past it, and autograd adds the two gradients. In GPT2-large this
takes 60 microseconds, twice per layer, to read and write what the norm's backward has just written. Here the path past
the norm is a second output of the function that contains the norm, Transformer Engine's LayerNormLinear, so both
gradients arrive together. The sum after attention or the MLP uses this output instead of the layer's input; past()
returns it. The values are the same; without the kernel the gradients are added as before.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportMissingImports=false

from collections.abc import Callable

import torch

from trainer.megatron import quantized
from trainer.patches import versions

WRITTEN_FOR = {"transformer-engine": ("2.20.2",), "megatron-core": ("0.19.2",)}

_split: tuple[torch.Tensor, torch.Tensor] | None = None  # the last norm's input, and the output that bypasses it
_incoming: torch.Tensor | None = None  # in backward, the gradient that bypassed the norm


def install(ours: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Split the paths at norms that use our kernel; `ours` decides by input and weight. A second call has no effect."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.fusions import fused_bias_dropout
    from transformer_engine.pytorch.module import layernorm_linear

    if hasattr(layernorm_linear._LayerNormLinear, "both"):
        return
    layernorm_linear._LayerNormLinear = splitting(layernorm_linear._LayerNormLinear, ours)
    fused_bias_dropout.bias_dropout_add_unfused = _past(fused_bias_dropout.bias_dropout_add_unfused)


def splitting(function: type, ours: Callable[[torch.Tensor, torch.Tensor], bool]) -> type:
    """Wrap Transformer Engine's function of a norm and a product; keep the path past the norm for the sum."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *args):
            outputs = function.forward(ctx, x, *args)
            quantized.reads(outputs[0], ctx.grad_output_quantizer)
            # An unused path has the gradient None, not zeros.
            ctx.set_materialize_grads(ctx.return_layernorm_output)
            return (*outputs, x)

        @staticmethod
        def backward(ctx, *gradients):
            global _incoming
            *of_outputs, _incoming = gradients
            try:
                of_inputs = function.backward(ctx, *of_outputs)
                left = take(of_inputs[0])
            finally:
                _incoming = None
            return of_inputs if left is None else (of_inputs[0] + left, *of_inputs[1:])

    class Splitting:
        both, forward = Both, function.forward

        @staticmethod
        def apply(x, weight, *args):
            global _split
            if not x.requires_grad or not ours(x, weight):
                return function.apply(x, weight, *args)
            *outputs, bypass = Both.apply(x, weight, *args)
            _split = x, bypass
            return tuple(outputs)

    return Splitting


def take(like: torch.Tensor) -> torch.Tensor | None:
    """Return and forget the gradient that bypassed the norm, in this shape, if any. The caller adds it."""
    global _incoming
    gradient, _incoming = _incoming, None
    return None if gradient is None else gradient.reshape(like.shape)


def past(residual: torch.Tensor) -> torch.Tensor:
    """Return the output that bypasses the last norm if the norm read this residual, else the residual itself."""
    global _split
    split, _split = _split, None
    return split[1] if split is not None and split[0] is residual else residual


def _past(unfused: Callable) -> Callable:
    """Wrap the sum of models without biases, which is not compiled."""

    def bias_dropout_add_unfused(training):
        add = unfused(training)
        return lambda x_with_bias, residual, prob: add(x_with_bias, past(residual), prob)

    return bias_dropout_add_unfused
