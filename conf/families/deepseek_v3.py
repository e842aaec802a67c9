"""DeepSeek-V3, R1 and V3.1: latent attention, and experts in groups chosen by sigmoid scores and a bias.

transformers ranks groups by their best 2 experts, Megatron by their best num_experts_per_tok / topk_group. This
quotient is 2 in the tiny model, as in the release.
"""

from conf.families.parts import family as shared
from conf.families.parts.family import Balance, Family, Serving
from conf.families.parts.keys import Keys, llama_facts
from conf.families.parts.sizes import ModelFacts


def facts(keys: Keys) -> ModelFacts:
    sizes = llama_facts(keys, expert_bias=True)
    if not sizes.shared_ffn:
        text = "n_shared_experts is 0, but Megatron-Bridge builds this family only with shared experts"
        raise ValueError(f"config.json: {text}")
    return sizes


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    read=shared.LATENT_EXPERTS,
    assumed=shared.SIGMOID | {"rope_interleave": (True,)},
    fixed={"moe_layer_freq": 1, "tie_word_embeddings": False, "attention_bias": False},
    rotations=shared.DEFAULT | shared.LATENT_YARN,
    defaults={"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
    repeats={"head_dim": "qk_rope_head_dim"},
    stated=(*shared.SIGMOID_SIZES, *shared.RANKS),
    not_null=(*shared.SIGMOID_SIZES, *shared.RANKS, "routed_scaling_factor"),
    facts=facts,
    by_name=True,
    balance=Balance("aux_loss_alpha", moves_bias=True),
    serving=Serving(packed=True),
    releases={"deepseek-ai/DeepSeek-V3-0324": 684.0},
)
