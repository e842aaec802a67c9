"""Bridges for families that Megatron-Bridge 0.6 does not convert, in its style.

    load(architecture)      register the bridge of a family, ours or Megatron-Bridge's, with AutoBridge

Remove a file when Megatron-Bridge has the family. Bridges of Megatron-Bridge are never replaced; their bugs are fixed
in trainer/patches/families/.
"""

import importlib

from trainer.patches import lazy_bridge

OURS = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "GPT2LMHeadModel": "gpt2",
}
# Patches for families of Megatron-Bridge, installed before the bridge is used.
PATCHED = {
    "OlmoeForCausalLM": ("norms_over_heads",),
    "MiniMaxM2ForCausalLM": ("norms_over_heads", "minimax_m2"),
    "DeepseekV3ForCausalLM": ("kimi_k2",),
    "GptOssForCausalLM": ("stacked_experts", "router_biases", "clamped_experts", "scaled_positions"),
}


def load(architecture: str) -> None:
    """Import the modules that register `architecture` (the first of config.json's architectures) with AutoBridge."""
    if architecture in OURS:
        importlib.import_module(f"{__name__}.{OURS[architecture]}")
    else:
        lazy_bridge.load_family(architecture)
    for patch in PATCHED.get(architecture, ()):
        importlib.import_module(f"trainer.patches.families.{patch}").install()
