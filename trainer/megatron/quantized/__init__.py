"""Norms and GELU that write FP8 themselves, for Transformer Engine's delayed scaling.

Its scale is known beforehand, so that what is quantized need not be written in bf16 and read again: casts behind norms
and GELU were 29 of 274 ms of a step of GPT2-large in FP8 on an H200. The numbers are those that Transformer Engine's
own quantizing makes of the bf16 ones.

A norm is told its quantizer. GELU comes before the layer that quantizes its numbers, and its backward before the one
that quantizes its gradient: they promise numbers, that is, they give out a tensor that is not filled, and the numbers
are made, or handed over, when it is asked to be quantized. That is for tensors which are read in no other way, as they
are between the two products of a dense layer whose every weight is trained; an adapter would read them in bf16. Where
nobody has asked for a promise when the next is made, the run ends: somebody has read what is not there.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from collections.abc import Callable
from typing import Any

import torch

TYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}

Fill = Callable[[torch.Tensor, Any], Any]  # makes a tensor's numbers: for a quantizer, or in place for None

_on = False  # whether Transformer Engine keeps promises
_promised: tuple[torch.Tensor, Fill] | None = None
_reader: tuple[int, int, Any] | None = None


class Parts:
    """A quantized tensor to be filled: its rows, the same turned, and where its scale and its largest number lie."""

    def __init__(self, quantizer: Any, like: torch.Tensor):
        self.whole = quantizer.make_empty(like.shape, dtype=like.dtype, device=like.device)
        kind, turned = TYPES[quantizer.dtype.name], self.whole._transpose
        self.rows = self.whole._data.view(kind)
        self.turned = None if turned is None else turned.view(kind)
        self.inverse, self.scale, self.largest = self.whole._scale_inv, quantizer.scale, quantizer.amax


def install() -> None:
    """Have Transformer Engine's layers take what was promised. A second call changes nothing."""
    import transformer_engine_torch as engine

    global _on
    if hasattr(engine, "plain_quantize"):
        return
    _on, engine.plain_quantize = True, engine.quantize
    engine.quantize, engine.bgrad_quantize = keeping(engine.quantize, engine.bgrad_quantize)


def keeping(quantize: Callable, with_bias: Callable) -> tuple[Callable, Callable]:
    """Transformer Engine's two functions, which keep promises."""

    def quantize_promised(x, quantizer, *given, **named):
        fill = _taken(x)
        if fill is None:
            return quantize(x, quantizer, *given, **named)
        if knows(quantizer) and not given and not named:
            return fill(x.detach(), quantizer)
        fill(x.detach(), None)
        return quantize(x, quantizer, *given, **named)

    def bias_quantize_promised(x, quantizer):
        if (fill := _taken(x)) is not None:
            fill(x.detach(), None)
        return with_bias(x, quantizer)

    return quantize_promised, bias_quantize_promised


def knows(quantizer: Any) -> bool:
    """Whether numbers are wanted by rows, at least, and by a scale that is known beforehand."""
    return type(quantizer).__name__ == "Float8Quantizer" and quantizer.rowwise_usage


def reads(out: torch.Tensor, quantizer: Any) -> None:
    """Take note of a layer's output, whose gradient the layer will quantize so."""
    global _reader
    _reader = (out.data_ptr(), out.numel(), quantizer) if _on and knows(quantizer) else None


def reader(x: torch.Tensor) -> Any:
    """The quantizer of the gradient of x, where x is what reads() was told last."""
    global _reader
    found, _reader = _reader, None
    return found[2] if found is not None and found[:2] == (x.data_ptr(), x.numel()) else None


def promise(like: torch.Tensor, fill: Fill) -> torch.Tensor:
    """A tensor of this shape that is not filled before it is asked to be quantized."""
    global _promised
    if _promised is not None:
        raise RuntimeError(
            "train.fp8=delayed: numbers that GELU promised were not asked to be quantized, but read as they are"
        )
    found = torch.empty_like(like, memory_format=torch.contiguous_format)
    _promised = found.detach(), fill  # held, so that its memory becomes no other tensor's
    return found


def _taken(x: torch.Tensor) -> Fill | None:
    """How to make the numbers of x, where they were promised."""
    global _promised
    if _promised is None or (x.data_ptr(), x.numel()) != (_promised[0].data_ptr(), _promised[0].numel()):
        return None
    (_, fill), _promised = _promised, None
    return fill
