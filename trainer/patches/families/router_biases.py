"""Patch for routers with a bias (gpt-oss): add the bias in the type of the scores, separately from the product.

Megatron-core lets Transformer Engine multiply bf16 with bf16 to fp32 scores, and passes the bias in bf16. The product
reads it as fp32: each expert gets the bias of another, and some get memory after the biases. In fp32, and on a CPU, it
is correct. A tiny model's log-probabilities on an H200 were off by 0.6 nats per token. Remove when
RouterGatingLinearFunction passes the product a bias of the scores' type, or none.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/moe_utils.py
"""

import torch

from trainer.patches import versions


def install() -> None:
    """Add the bias of routers separately, in this process."""
    versions.check(__name__)
    from megatron.core.transformer.moe import moe_utils, router

    multiply = moe_utils.router_gating_linear

    def with_bias_apart(
        inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: torch.dtype
    ) -> torch.Tensor:
        if bias is None or bias.dtype == router_dtype:
            return multiply(inp, weight, bias, router_dtype)
        return multiply(inp, weight, None, router_dtype) + bias.to(router_dtype)

    if router.router_gating_linear is multiply:  # not patched yet
        router.router_gating_linear = with_bias_apart
