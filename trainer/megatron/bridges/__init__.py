"""Bridges of our own, for families that Megatron-Bridge 0.6 does not convert; written as it writes its own.

    load(architecture)      register the bridge of a family, ours or Megatron-Bridge's, with AutoBridge

Each file goes when Megatron-Bridge has the family. One that it has already is never replaced.
"""

import importlib

from trainer.patches import lazy_bridge

OURS = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "GPT2LMHeadModel": "gpt2",
}


def load(architecture: str) -> None:
    """Import the modules that register `architecture` (the first of config.json's architectures) with AutoBridge."""
    if architecture in OURS:
        importlib.import_module(f"{__name__}.{OURS[architecture]}")
    else:
        lazy_bridge.load_family(architecture)
