"""Bridge of Mixtral: a Llama whose MLPs are experts, of which a token takes some, with weights that sum to 1."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping, QKVMapping
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import MixtralForCausalLM


@MegatronModelBridge.register_bridge(source=MixtralForCausalLM, target=GPTModel, model_type="mixtral")
class MixtralBridge(MegatronModelBridge):
    """Bridge between transformers' MixtralForCausalLM and Megatron's GPTModel."""

    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        config = hf_pretrained.config

        provider.normalization = "RMSNorm"
        provider.gated_linear_unit = True
        provider.add_bias_linear = False
        provider.add_qkv_bias = False
        provider.qk_layernorm = False
        provider.hidden_dropout = 0.0
        provider.autocast_dtype = torch.bfloat16
        provider.mtp_num_layers = None

        provider.num_moe_experts = config.num_local_experts
        provider.moe_ffn_hidden_size = config.intermediate_size
        provider.moe_router_score_function = "softmax"
        provider.moe_router_pre_softmax = False  # over the experts taken: their weights sum to 1
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
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "mlp.router.weight": "block_sparse_moe.gate.weight",
        }
        plain |= {f"decoder.layers.*.{name}": f"model.layers.*.{released}" for name, released in of_layer.items()}
        mappings = [AutoMapping(megatron_param=name, hf_param=released) for name, released in plain.items()]
        mappings.append(
            QKVMapping(
                megatron_param="decoder.layers.*.self_attention.linear_qkv.weight",
                q="model.layers.*.self_attn.q_proj.weight",
                k="model.layers.*.self_attn.k_proj.weight",
                v="model.layers.*.self_attn.v_proj.weight",
            )
        )
        expert = "model.layers.*.block_sparse_moe.experts.*"
        for fc1, fc2 in (  # of grouped experts, and of experts that are modules of their own
            ("linear_fc1.weight*", "linear_fc2.weight*"),
            ("local_experts.*.linear_fc1.weight", "local_experts.*.linear_fc2.weight"),
        ):
            mappings += [
                GatedMLPMapping(
                    megatron_param=f"decoder.layers.*.mlp.experts.{fc1}",
                    gate=f"{expert}.w1.weight",
                    up=f"{expert}.w3.weight",
                ),
                AutoMapping(megatron_param=f"decoder.layers.*.mlp.experts.{fc2}", hf_param=f"{expert}.w2.weight"),
            ]
        return MegatronMappingRegistry(*mappings)
