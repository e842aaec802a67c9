"""Patch for the gradients of queries, keys and values that are one product: they are not copied into one again.

Megatron-core splits that product by Transformer Engine's _SplitAlongDim, which sees in backward that fused attention
has left the three gradients in one piece of memory. Transformer Engine has it by another name, SplitAlongDim, and in
another place; megatron-core then takes torch.split, which joins them: 19 of 396 ms of a step of GPT2-large on an H200.
Where heads share keys, or positions turn them, the gradients lie apart and are joined either way. Can go when
megatron-core asks for the new name.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/extensions/transformer_engine.py
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}


def install() -> None:
    """Give Transformer Engine's split its former name. Call before the first import of Megatron, on a GPU."""
    versions.check(__name__, WRITTEN_FOR)
    from transformer_engine.pytorch import attention, utils

    if not hasattr(attention, "_SplitAlongDim"):
        attention._SplitAlongDim = utils.SplitAlongDim
