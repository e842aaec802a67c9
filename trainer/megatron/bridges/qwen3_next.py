"""Bridge of Qwen3-Next: Megatron-Bridge's, with the kernels of gated delta nets, and experts balanced over rows."""

# pyright: reportAttributeAccessIssue=false

from trainer.patches import lazy_bridge
from trainer.patches.families import delta_nets

lazy_bridge.load_family("Qwen3NextForCausalLM")
from megatron.bridge.models.qwen import qwen3_next_bridge  # noqa: E402

Bridge = qwen3_next_bridge.Qwen3NextBridge
provide = Bridge.provider_bridge


def provider_bridge(self, hf_pretrained):
    provider = provide(self, hf_pretrained)
    provider.moe_router_load_balancing_type = "aux_loss"
    provider.moe_aux_loss_coeff = hf_pretrained.config.router_aux_loss_coef
    return provider


delta_nets.use_kernels(qwen3_next_bridge)
Bridge.provider_bridge = provider_bridge
