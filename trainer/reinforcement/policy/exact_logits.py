"""Logits in fp32 of a model in bf16 or fp16, as vLLM is asked for them too: what both say differs by less.

Rounded to bf16, a logit of 20 is off by up to 0.06, on each side by another amount. Inputs and weights stay as they
are, and products are added up in fp32 anyway: only the sum is no longer rounded.
"""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false

from typing import Any

import torch


def install(model: Any) -> None:
    """Have the layer of logits of a model's last stage give them in fp32."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        layer = getattr(chunk, "output_layer", None)
        # An adapter of it adds its part to what the layer itself gives.
        layer = getattr(layer, "to_wrap", layer)
        if isinstance(layer, ColumnParallelLinear):
            layer._forward_impl = logits


def logits(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **_: Any,
) -> torch.Tensor:
    """The product of megatron-core's layer, by the arguments that it is called with."""
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )

    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    found = Product.apply(input.flatten(0, -2), weight).unflatten(0, input.shape[:-1])
    return found if bias is None else found + bias


class Product(torch.autograd.Function):
    """Rows times a weight, of one type both, in fp32. Gradients are multiplied in that type, as they are elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        if rows.is_cuda and rows.dtype != torch.float32:
            return torch.mm(rows, weight.t(), out_dtype=torch.float32)
        return rows.float().mm(weight.float().t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, weight = ctx.saved_tensors
        gradient = gradient.to(rows.dtype)
        of_rows, of_weight = ctx.needs_input_grad
        return gradient.mm(weight) if of_rows else None, gradient.t().mm(rows) if of_weight else None
