"""Bridge of Mixtral: a Llama with experts as MLPs; a token uses a few of them, with weights that sum to 1."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import MixtralForCausalLM

from trainer.megatron.bridges import llama_with_experts


@MegatronModelBridge.register_bridge(source=MixtralForCausalLM, target=GPTModel, model_type="mixtral")
class MixtralBridge(MegatronModelBridge):
    """Bridge between transformers' MixtralForCausalLM and Megatron's GPTModel."""

    def provider_bridge(self, hf_pretrained):
        provider = super().provider_bridge(hf_pretrained)
        llama_with_experts.set_up(provider)
        provider.moe_ffn_hidden_size = hf_pretrained.config.intermediate_size
        provider.moe_router_pre_softmax = False  # softmax over the chosen experts: their weights sum to 1
        return provider

    def mapping_registry(self) -> MegatronMappingRegistry:
        mappings = llama_with_experts.mappings({"mlp.router.weight": "block_sparse_moe.gate.weight"}, "weight")
        mappings += llama_with_experts.of_experts("block_sparse_moe.experts", "w1", "w3", "w2")
        return MegatronMappingRegistry(*mappings)
