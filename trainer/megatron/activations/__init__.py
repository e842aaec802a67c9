"""GELU, SwiGLU and the sum with the residual by Triton kernels, in place of torch's compiled functions.

A compiled function costs the host about 0.2 ms per call, and a layer of GPT-2 calls three of them forward and three
backward. The compiled weighted SwiGLU of experts reads its output again for the gradients of the weights, and a bias's
gradient is summed from a separate tensor. The functions equal those of megatron-core's fused_bias_gelu.py,
fused_bias_swiglu.py and fused_bias_dropout.py, within the rounding of the type. With dropout the compiled functions
stay.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

import torch

from trainer.megatron import quantized
from trainer.megatron.activations import kernel
from trainer.megatron.norms import residual as way
from trainer.megatron.quantized import kernel as in_fp8


def install() -> None:
    """Make Megatron-Core call the kernels. A second call has no effect."""
    from megatron.core.fusions import fused_bias_dropout, fused_bias_gelu, fused_bias_swiglu

    if fused_bias_gelu.bias_gelu is kernel.bias_gelu:
        return
    fused_bias_gelu.bias_gelu = kernel.bias_gelu
    fused_bias_gelu.GeLUFunction.forward = staticmethod(_gelu)
    fused_bias_gelu.GeLUFunction.backward = staticmethod(_gelu_back)
    fused_bias_swiglu.swiglu = fused_bias_swiglu.weighted_swiglu = kernel.swiglu
    fused_bias_swiglu.swiglu_back = lambda gradient, x: kernel.swiglu_back(gradient, x)[0]
    fused_bias_swiglu.weighted_swiglu_back = kernel.swiglu_back
    fused_bias_dropout.bias_dropout_add_fused_train = _adding(fused_bias_dropout.bias_dropout_add_fused_train)


def _gelu(ctx, x, bias):
    ctx.save_for_backward(x, bias)
    ctx.reader = quantized.reader(x)
    if ctx.reader is None:
        return kernel.bias_gelu(bias, x)
    x, bias = x.detach().contiguous(), bias.detach()

    def fill(place, quantizer):
        if quantizer is None:
            return place.copy_(kernel.bias_gelu(bias, x).view(place.shape))
        return in_fp8.gelu(bias, x, quantized.Parts(quantizer, place))

    return quantized.promise(x, fill)


def _gelu_back(ctx, gradient):
    x, bias = ctx.saved_tensors
    if ctx.reader is None:
        return kernel.bias_gelu_back(gradient, bias, x)
    ctx.reader.set_usage(rowwise=True, columnwise=True)
    parts = quantized.Parts(ctx.reader, x.view(-1, x.shape[-1]))
    of_x, of_bias = in_fp8.gelu_back(gradient.contiguous(), bias, x.contiguous(), parts)
    reader, shape = ctx.reader, parts.rows.shape

    def fill(place, quantizer):
        if quantizer is reader and place.shape == shape:
            return of_x
        place.copy_(of_x.dequantize().view(place.shape))
        return None if quantizer is None else quantizer(place)

    return quantized.promise(x, fill), of_bias


def _adding(compiled):
    """Return the sum of the residual and a biased output; `compiled` handles dropout and other cases."""

    def bias_dropout_add(x_with_bias, residual, prob):
        x, bias = x_with_bias
        residual = way.past(residual)
        if bias is None or prob or x.dtype != residual.dtype:
            return compiled(x_with_bias, residual, prob)
        return _Sum.apply(x, bias, residual)

    return bias_dropout_add


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, residual):
        ctx.type = bias.dtype
        return kernel.bias_add(x, bias, residual)

    @staticmethod
    def backward(ctx, gradient):
        of_bias = kernel.column_sums(gradient).to(ctx.type) if ctx.needs_input_grad[1] else None
        return gradient, of_bias, gradient
