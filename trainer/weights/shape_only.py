"""Providers for families that Megatron-Bridge 0.6 cannot convert, made from their facts as Bridge would make them.

They serve rehearsals, which need a model's shape and no weights: GPT-2, Mixtral and Qwen2-MoE. Scaling of rotary
embeddings, the router's scores and other settings that change no shape are left at Megatron's defaults.
"""

# pyright: reportArgumentType=false

from dataclasses import dataclass
from functools import partial

from conf.model_facts import GPT2, UNBRIDGED, ModelFacts

FAMILIES = UNBRIDGED


@dataclass(frozen=True)
class Unbridged:
    """Replacement for an AutoBridge in trainer.megatron.model.make_provider()."""

    facts: ModelFacts

    def to_megatron_provider(self, load_weights: bool = False):
        import torch
        from megatron.bridge.models.gpt_provider import GPTModelProvider
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        assert not load_weights
        facts = self.facts
        provider = GPTModelProvider(
            num_layers=facts.layers,
            hidden_size=facts.hidden,
            ffn_hidden_size=facts.ffn or facts.expert_ffn,
            num_attention_heads=facts.heads,
            num_query_groups=facts.kv_heads,
            kv_channels=facts.head_dim,
            vocab_size=facts.vocab,
            should_pad_vocab=facts.vocab_pad > 0,
            make_vocab_size_divisible_by=facts.vocab_pad or 1,
            gated_linear_unit=facts.gated,
            activation_func=torch.nn.functional.silu if facts.gated else torch.nn.functional.gelu,
            normalization="LayerNorm" if facts.layernorm else "RMSNorm",
            add_bias_linear=facts.linear_bias,
            add_qkv_bias=facts.attention_bias,
            qk_layernorm=facts.qk_norm,
            share_embeddings_and_output_weights=facts.tied,
            position_embedding_type="learned_absolute" if facts.positions else "rope",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=facts.architecture == GPT2,  # as Bridge does for families that it has
            bias_dropout_fusion=facts.architecture == GPT2,
            transformer_layer_spec=partial(get_gpt_decoder_block_spec, use_transformer_engine=True),
        )
        if facts.experts:
            provider.num_moe_experts = facts.experts
            provider.moe_router_topk = facts.top_k
            provider.moe_ffn_hidden_size = facts.expert_ffn
            provider.moe_shared_expert_intermediate_size = facts.shared_ffn or None
            provider.moe_shared_expert_gate = facts.shared_gate
            provider.moe_layer_freq = [int(kind == "moe") for kind in facts.kinds]
        return provider
