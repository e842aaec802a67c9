"""The way past a norm: its gradient is added by the kernel that makes the norm's, and not by a kernel of its own.

What a layer reads goes two ways, through a norm and past it, and autograd adds the two gradients: 60 microseconds each
time in GPT2-large, twice a layer, to read and write what the norm's backward has just written. Here the way past is a
second output of the function that has the norm, Transformer Engine's LayerNormLinear, so that both gradients come back
together. The sum behind attention or the MLP takes it in place of the layer's input: past() gives it. Both are the
same numbers, and without the kernel the gradients are added as before.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
# pyright: reportMissingImports=false

from collections.abc import Callable

import torch

from trainer.megatron import quantized
from trainer.patches import versions

WRITTEN_FOR = {"transformer-engine": ("2.20.2",), "megatron-core": ("0.19.2",)}

_split: tuple[torch.Tensor, torch.Tensor] | None = None  # what the last norm has read, and the way past it
_coming: torch.Tensor | None = None  # in backward, the gradient that came past the norm


def install(ours: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
    """Split the ways at norms whose kernel is ours, of an input and a weight. A second call changes nothing."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.fusions import fused_bias_dropout
    from transformer_engine.pytorch.module import layernorm_linear

    if hasattr(layernorm_linear._LayerNormLinear, "both"):
        return
    layernorm_linear._LayerNormLinear = splitting(layernorm_linear._LayerNormLinear, ours)
    fused_bias_dropout.bias_dropout_add_unfused = _past(fused_bias_dropout.bias_dropout_add_unfused)


def splitting(function: type, ours: Callable[[torch.Tensor, torch.Tensor], bool]) -> type:
    """Transformer Engine's function of a norm and a product, which keeps the way past the norm for the sum."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *given):
            found = function.forward(ctx, x, *given)
            quantized.reads(found[0], ctx.grad_output_quantizer)
            # A way that nobody took has no gradient, and not one of zeros.
            ctx.set_materialize_grads(ctx.return_layernorm_output)
            return (*found, x)

        @staticmethod
        def backward(ctx, *gradients):
            global _coming
            *given, _coming = gradients
            try:
                found = function.backward(ctx, *given)
                left = take(found[0])
            finally:
                _coming = None
            return found if left is None else (found[0] + left, *found[1:])

    class Splitting:
        both, forward = Both, function.forward

        @staticmethod
        def apply(x, weight, *given):
            global _split
            if not x.requires_grad or not ours(x, weight):
                return function.apply(x, weight, *given)
            *found, beside = Both.apply(x, weight, *given)
            _split = x, beside
            return tuple(found)

    return Splitting


def take(like: torch.Tensor) -> torch.Tensor | None:
    """The gradient that came past the norm, in this shape, where there is one. Who takes it adds it."""
    global _coming
    found, _coming = _coming, None
    return None if found is None else found.reshape(like.shape)


def past(residual: torch.Tensor) -> torch.Tensor:
    """The way past the norm that has read this residual last; the residual itself, where it went no other way."""
    global _split
    found, _split = _split, None
    return found[1] if found is not None and found[0] is residual else residual


def _past(unfused: Callable) -> Callable:
    """The sum of models without biases, which is not compiled."""

    def bias_dropout_add_unfused(training):
        add = unfused(training)
        return lambda x_with_bias, residual, prob: add(x_with_bias, past(residual), prob)

    return bias_dropout_add_unfused
