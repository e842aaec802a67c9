"""Bridge of gpt-oss: Megatron-Bridge's own, with patches of its experts, routers and positions."""

from trainer.patches import lazy_bridge
from trainer.patches.families import clamped_experts, router_biases, scaled_positions, stacked_experts

lazy_bridge.load_family("GptOssForCausalLM")
for patch in (stacked_experts, router_biases, clamped_experts, scaled_positions):
    patch.install()
