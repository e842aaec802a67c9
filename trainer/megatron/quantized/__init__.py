"""Norms and GELU that write FP8 directly, for Transformer Engine's delayed scaling.

With delayed scaling the scale is known in advance, so values need not be written in bf16 and read again. Casts after
norms and GELU took 29 of 274 ms of a step of GPT2-large in FP8 on an H200. The values equal those of Transformer
Engine's quantization of the bf16 tensors.

A norm gets its quantizer. GELU runs before the layer that quantizes its output, and its backward before the layer that
quantizes its gradient. They therefore promise values: they return an unfilled tensor, and the values are computed or
handed over when the tensor is quantized. This is only for tensors that are never read otherwise: those between the two
products of a dense layer in full training. An adapter would read them in bf16. If a promise is still open when the next
one is made, the run ends, because somebody has read unfilled memory.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from collections.abc import Callable
from typing import Any

import torch

TYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}

Fill = Callable[[torch.Tensor, Any], Any]  # computes a tensor's values: for a quantizer, or in place for None

_on = False  # whether Transformer Engine's functions are replaced
_promised: tuple[torch.Tensor, Fill] | None = None
_reader: tuple[int, int, Any] | None = None


class Parts:
    """A quantized tensor to fill: its rows, its transpose, and the tensors of its scale and its maximum."""

    def __init__(self, quantizer: Any, like: torch.Tensor):
        self.whole = quantizer.make_empty(like.shape, dtype=like.dtype, device=like.device)
        kind, turned = TYPES[quantizer.dtype.name], self.whole._transpose
        self.rows = self.whole._data.view(kind)
        self.turned = None if turned is None else turned.view(kind)
        self.inverse, self.scale, self.largest = self.whole._scale_inv, quantizer.scale, quantizer.amax


def install() -> None:
    """Make Transformer Engine's layers fulfil promises. A second call has no effect."""
    import transformer_engine_torch as engine

    global _on
    if hasattr(engine, "plain_quantize"):
        return
    _on, engine.plain_quantize = True, engine.quantize
    engine.quantize, engine.bgrad_quantize = keeping(engine.quantize, engine.bgrad_quantize)


def keeping(quantize: Callable, with_bias: Callable) -> tuple[Callable, Callable]:
    """Wrap Transformer Engine's two functions to fulfil promises."""

    def quantize_promised(x, quantizer, *args, **kwargs):
        fill = _taken(x)
        if fill is None:
            return quantize(x, quantizer, *args, **kwargs)
        if knows(quantizer) and not args and not kwargs:
            return fill(x.detach(), quantizer)
        fill(x.detach(), None)
        return quantize(x, quantizer, *args, **kwargs)

    def bias_quantize_promised(x, quantizer):
        if (fill := _taken(x)) is not None:
            fill(x.detach(), None)
        return with_bias(x, quantizer)

    return quantize_promised, bias_quantize_promised


def knows(quantizer: Any) -> bool:
    """Whether the values are quantized by rows (at least) with a scale known in advance."""
    return type(quantizer).__name__ == "Float8Quantizer" and quantizer.rowwise_usage


def reads(out: torch.Tensor, quantizer: Any) -> None:
    """Record a layer's output; the layer will quantize the gradient of this output."""
    global _reader
    _reader = (out.data_ptr(), out.numel(), quantizer) if _on and knows(quantizer) else None


def reader(x: torch.Tensor) -> Any:
    """Return the quantizer of the gradient of x, if x is the output recorded last."""
    global _reader
    record, _reader = _reader, None
    return record[2] if record is not None and record[:2] == (x.data_ptr(), x.numel()) else None


def promise(like: torch.Tensor, fill: Fill) -> torch.Tensor:
    """Return an unfilled tensor of this shape; it is filled when it is quantized."""
    global _promised
    if _promised is not None:
        raise RuntimeError(
            "train.fp8=delayed: GELU's output was read without quantization, before its values were computed"
        )
    unfilled = torch.empty_like(like, memory_format=torch.contiguous_format)
    _promised = unfilled.detach(), fill  # the reference keeps the memory from being reused
    return unfilled


def _taken(x: torch.Tensor) -> Fill | None:
    """Return and forget the function that computes x, if x was promised."""
    global _promised
    if _promised is None or (x.data_ptr(), x.numel()) != (_promised[0].data_ptr(), _promised[0].numel()):
        return None
    (_, fill), _promised = _promised, None
    return fill
