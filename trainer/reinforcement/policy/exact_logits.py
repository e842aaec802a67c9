"""Logits in fp32 of a model in bf16 or fp16. vLLM does the same, so trainer and vLLM differ less.

Rounded to bf16, a logit of 20 has an error of up to 0.06, which differs between trainer and vLLM. Inputs and weights
keep their type. Products are summed in fp32 in any case; here the sum is no longer rounded.
"""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false

from typing import Any

import torch


def install(model: Any) -> None:
    """Make the output layer of a model's last stage return fp32 logits."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(model):
        layer = getattr(chunk, "output_layer", None)
        # An adapter adds its part to the output of the wrapped layer.
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
    """The product of megatron-core's output layer, with the arguments that it passes."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    product = Product.apply(input.flatten(0, -2), weight).unflatten(0, input.shape[:-1])
    return product if bias is None else product + bias


class Product(torch.autograd.Function):
    """Product of rows and a weight of the same type, in fp32. Gradients are multiplied in that type, as usual."""

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
