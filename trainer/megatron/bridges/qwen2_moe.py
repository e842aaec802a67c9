"""Bridge of Qwen2-MoE and Qwen1.5-MoE: routed experts beside a shared one, which each token weighs by a gate."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from functools import partial

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import Qwen2MoeForCausalLM


@MegatronModelBridge.register_bridge(source=Qwen2MoeForCausalLM, target=GPTModel, model_type="qwen2_moe")
class Qwen2MoEBridge(MegatronModelBridge):
    """Bridge between transformers' Qwen2MoeForCausalLM and Megatron's GPTModel."""

    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config

        # a layer's kind is its own: every decoder_sparse_step-th has experts, but for mlp_only_layers
        provider.transformer_layer_spec = partial(get_gpt_decoder_block_spec, use_transformer_engine=True)
        provider.moe_layer_freq = [
            int(layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0)
            for layer in range(config.num_hidden_layers)
        ]
        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.add_qkv_bias = config.qkv_bias
        provider.qk_layernorm = False
        provider.hidden_dropout = 0.0
        provider.autocast_dtype = torch.bfloat16
        provider.mtp_num_layers = None

        provider.num_moe_experts = config.num_experts
        provider.moe_shared_expert_intermediate_size = config.shared_expert_intermediate_size
        provider.moe_shared_expert_gate = True
        provider.moe_router_score_function = "softmax"
        provider.moe_router_pre_softmax = not config.norm_topk_prob  # over all experts, or over those taken
        provider.moe_router_load_balancing_type = "aux_loss"
        provider.moe_aux_loss_coeff = config.router_aux_loss_coef
        provider.moe_grouped_gemm = True
        provider.moe_token_dispatcher_type = "alltoall"
        provider.moe_permute_fusion = True
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        plain = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
        }
        of_layer = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # of a dense layer
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",  # of one with experts
            "mlp.router.weight": "mlp.gate.weight",
            "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
        }
        plain |= {f"decoder.layers.*.{name}": f"model.layers.*.{released}" for name, released in of_layer.items()}
        mappings = [AutoMapping(megatron_param=name, hf_param=released) for name, released in plain.items()]
        mappings.append(
            ReplicatedMapping(
                megatron_param="decoder.layers.*.mlp.shared_experts.gate_weight",
                hf_param="model.layers.*.mlp.shared_expert_gate.weight",
            )
        )
        for kind in ("weight", "bias"):
            names = {part: f"model.layers.*.self_attn.{part}_proj.{kind}" for part in "qkv"}
            mappings.append(QKVMapping(f"decoder.layers.*.self_attention.linear_qkv.{kind}", **names))
        for fc1, mlp in (
            ("linear_fc1.weight", "mlp"),
            ("shared_experts.linear_fc1.weight", "mlp.shared_expert"),
            ("experts.linear_fc1.weight*", "mlp.experts.*"),
            ("experts.local_experts.*.linear_fc1.weight", "mlp.experts.*"),
        ):
            mappings.append(
                GatedMLPMapping(
                    megatron_param=f"decoder.layers.*.mlp.{fc1}",
                    gate=f"model.layers.*.{mlp}.gate_proj.weight",
                    up=f"model.layers.*.{mlp}.up_proj.weight",
                )
            )
        for fc2 in ("linear_fc2.weight*", "local_experts.*.linear_fc2.weight"):
            mappings.append(
                AutoMapping(
                    megatron_param=f"decoder.layers.*.mlp.experts.{fc2}",
                    hf_param="model.layers.*.mlp.experts.*.down_proj.weight",
                )
            )
        return MegatronMappingRegistry(*mappings)
