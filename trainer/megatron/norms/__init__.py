"""Layer norms and RMS norms by Triton kernels, for widths that Transformer Engine has no special kernel for.

Transformer Engine has special kernels for powers of two. Other widths, such as GPT2-large's 1,280 and GLM-4.7's 5,120,
share a general kernel, which reaches a third of the memory bandwidth. For FP8, the output is quantized within the norm
if the scale is known, and after it otherwise. The norm's backward kernel also adds the gradient of the residual
(residual.py).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false

import torch

from trainer.megatron import quantized
from trainer.megatron.norms import kernel, residual
from trainer.megatron.quantized import kernel as in_fp8

NARROWEST, WIDEST = 1024, 16384


def install() -> None:
    """Make Transformer Engine call the kernels. A second call has no effect."""
    import transformer_engine_torch as engine
    from transformer_engine.pytorch import cpp_extensions
    from transformer_engine.pytorch.ops.basic import layer_norm, rmsnorm

    if hasattr(engine, "general_norms"):
        return
    engine.general_norms, ours = _functions(engine)
    for function in ours:
        for module in (engine, cpp_extensions, layer_norm, rmsnorm):  # each module imports the functions by name
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
    residual.install(lambda x, weight: x.is_contiguous() and _ours(x.view(-1, x.shape[-1]), weight))


def _functions(engine) -> tuple[dict, tuple]:
    """Return the engine's functions, and ours, which fall back to the engine's for other widths."""
    theirs = {name: getattr(engine, name) for name in ("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd")}

    def layernorm_fwd(x, weight, bias, epsilon, out, quantizer, kind, margin, centered):
        if out is not None or not _ours(x, weight):
            return theirs["layernorm_fwd"](x, weight, bias, epsilon, out, quantizer, kind, margin, centered)
        return _forward(engine, x, weight, bias, epsilon, quantizer, centered)

    def rmsnorm_fwd(x, weight, epsilon, out, quantizer, kind, margin, centered):
        if out is not None or not _ours(x, weight):
            return theirs["rmsnorm_fwd"](x, weight, epsilon, out, quantizer, kind, margin, centered)
        rows, _, spreads = _forward(engine, x, weight, None, epsilon, quantizer, centered)
        return rows, None, spreads

    def layernorm_bwd(gradient, x, means, spreads, weight, margin, centered):
        if not _ours(x, weight):
            return theirs["layernorm_bwd"](gradient, x, means, spreads, weight, margin, centered)
        return _backward(gradient, x, means, spreads, weight, centered)

    def rmsnorm_bwd(gradient, x, spreads, weight, margin, centered):
        if not _ours(x, weight):
            return theirs["rmsnorm_bwd"](gradient, x, spreads, weight, margin, centered)
        return _backward(gradient, x, None, spreads, weight, centered)[:2]

    return theirs, (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd)


def _ours(x: torch.Tensor, weight: torch.Tensor) -> bool:
    width = weight.numel()
    plain = x.dim() == 2 and x.is_contiguous() and x.dtype == weight.dtype
    return plain and NARROWEST < width <= WIDEST and bool(width & (width - 1))


def _forward(engine, x, weight, bias, epsilon, quantizer, centered):
    if quantizer is not None and quantized.knows(quantizer):
        _, means, spreads = kernel.forward(x, weight, bias, epsilon, centered, normed=False)
        parts = quantized.Parts(quantizer, x)
        return in_fp8.norm(x, weight, bias, None if bias is None else means, spreads, centered, parts), means, spreads
    rows, means, spreads = kernel.forward(x, weight, bias, epsilon, centered)
    return (rows if quantizer is None else engine.quantize(rows, quantizer)), means, spreads


def _backward(gradient, x, means, spreads, weight, centered):
    # A view of a trained parameter has requires_grad False when autograd is off.
    trained = weight.requires_grad or not isinstance(weight, torch.nn.Parameter)
    return kernel.backward(gradient, x, means, spreads, weight, centered, trained, residual.take(x))
