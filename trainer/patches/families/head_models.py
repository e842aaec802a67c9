"""Patch for classes named LMHeadModel: Megatron-Bridge's AutoBridge then takes GPT2LMHeadModel too.

AutoBridge asks the ending of an architecture's name before it asks whether a bridge is registered, and knows no such
ending (https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/conversion/auto_bridge.py).
Can go when it asks its registered bridges alone.
"""

from trainer.patches import versions

WRITTEN_FOR = {"megatron-bridge": ("0.6.2",)}
ENDING = "LMHeadModel"


def install() -> None:
    """Add the ending to those that AutoBridge takes."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.bridge.models.conversion import auto_bridge

    if ENDING not in auto_bridge.SUPPORTED_HF_ARCHITECTURES:
        auto_bridge.SUPPORTED_HF_ARCHITECTURES += (ENDING,)
