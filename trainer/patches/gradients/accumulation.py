"""Replacement for APEX's module that adds the gradient of the logits layer to the main gradient; no wheel provides it.

With gradient_accumulation_fusion, the products of Transformer Engine's layers are added directly to the fp32 gradients
instead of being written in bf16 and added later: a step of GPT2-large in FP8 takes 281 instead of 346 ms on an H200.
Megatron-core then needs APEX for the same in its own layer, that of the logits, and refuses to build a model without
it. Here torch multiplies and adds, as it does without the fusion. Remove when that layer always uses Transformer
Engine's product, as it does for Megatron-FSDP.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/tensor_parallel/layers.py
"""

import sys
import types

from trainer.patches import versions

APEX = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Give megatron-core a module with the name of APEX's. Call before the first import of Megatron, on a GPU."""
    versions.check(__name__)
    if APEX not in sys.modules:
        module = types.ModuleType(APEX)
        module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add  # pyright: ignore
        sys.modules[APEX] = module


def add(inputs, gradients, main) -> None:
    """Add a weight's gradient (that of the outputs times the inputs) to its main gradient."""
    main.add_(gradients.t().matmul(inputs))
