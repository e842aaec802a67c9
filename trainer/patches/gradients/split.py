"""Patch for the gradients of a fused product of queries, keys and values: they are not concatenated again.

Megatron-core splits that product by Transformer Engine's _SplitAlongDim, which detects in backward that fused attention
wrote the three gradients to one piece of memory. Transformer Engine has renamed it to SplitAlongDim and moved it;
megatron-core then uses torch.split, whose backward concatenates: 19 of 396 ms of a step of GPT2-large on an H200. If
heads share keys, or positions are rotated, the gradients are separate and concatenated either way. Remove when
megatron-core uses the new name.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/extensions/transformer_engine.py
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from trainer.patches import versions


def install() -> None:
    """Add the old name of Transformer Engine's split. Call before the first import of Megatron, on a GPU."""
    versions.check(__name__)
    from transformer_engine.pytorch import attention, utils

    if not hasattr(attention, "_SplitAlongDim"):
        attention._SplitAlongDim = utils.SplitAlongDim
