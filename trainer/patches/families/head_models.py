"""Patch for classes named LMHeadModel: Megatron-Bridge's AutoBridge then accepts GPT2LMHeadModel too.

AutoBridge checks the ending of an architecture's name before it checks whether a bridge is registered, and this ending
is not in its list
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/conversion/auto_bridge.py). Remove
when it checks only its registered bridges.
"""

from trainer.patches import versions

ENDING = "LMHeadModel"


def install() -> None:
    """Add the ending to AutoBridge's list."""
    versions.check(__name__)
    from megatron.bridge.models.conversion import auto_bridge

    if ENDING not in auto_bridge.SUPPORTED_HF_ARCHITECTURES:
        auto_bridge.SUPPORTED_HF_ARCHITECTURES += (ENDING,)
