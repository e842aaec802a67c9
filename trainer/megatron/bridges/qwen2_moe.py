"""Bridge of Qwen2-MoE and Qwen1.5-MoE: routed experts and a shared one, which each token weights by a gate."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from functools import partial

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import GatedMLPMapping, ReplicatedMapping
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import Qwen2MoeForCausalLM

from trainer.megatron.bridges import llama_with_experts


@MegatronModelBridge.register_bridge(source=Qwen2MoeForCausalLM, target=GPTModel, model_type="qwen2_moe")
class Qwen2MoEBridge(MegatronModelBridge):
    """Bridge between transformers' Qwen2MoeForCausalLM and Megatron's GPTModel."""

    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config

        # Layers differ: every decoder_sparse_step-th has experts, except mlp_only_layers.
        provider.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
        provider.moe_layer_freq = [
            int(layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0)
            for layer in range(config.num_hidden_layers)
        ]
        llama_with_experts.set_up(provider)
        provider.add_qkv_bias = config.qkv_bias
        provider.moe_shared_expert_intermediate_size = config.shared_expert_intermediate_size
        provider.moe_shared_expert_gate = True
        provider.moe_router_pre_softmax = not config.norm_topk_prob  # softmax over all experts, or over the chosen ones
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        of_layer = {
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # of a dense layer
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "mlp.router.weight": "mlp.gate.weight",
            "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
        }
        mappings = llama_with_experts.mappings(of_layer, "weight", "bias")
        gate = "model.layers.*.mlp.shared_expert_gate.weight"
        mappings.append(ReplicatedMapping("decoder.layers.*.mlp.shared_experts.gate_weight", gate))
        for mlp, released in (("mlp", "mlp"), ("mlp.shared_experts", "mlp.shared_expert")):
            mappings.append(
                GatedMLPMapping(
                    f"decoder.layers.*.{mlp}.linear_fc1.weight",
                    gate=f"model.layers.*.{released}.gate_proj.weight",
                    up=f"model.layers.*.{released}.up_proj.weight",
                )
            )
        mappings += llama_with_experts.of_experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
        return MegatronMappingRegistry(*mappings)
