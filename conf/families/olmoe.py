"""OLMoE: experts in every layer, and norms of queries and keys over all heads together.

intermediate_size is the width of an expert. The numbers of heads and key-value heads are equal.
"""

from functools import partial

from conf.families.parts.family import DEFAULT, ROTARY, SILU, SIZES, YARN, Balance, Family
from conf.families.parts.keys import llama_facts

FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    read=SIZES | ROTARY | {"rms_norm_eps", "head_dim", "num_experts", "num_local_experts", "num_experts_per_tok"},
    assumed=SILU
    | {"norm_topk_prob": (False,), "attention_bias": (False,), "clip_qkv": (None,)}
    | {"tie_word_embeddings": (False,), "scoring_func": ("softmax",)},
    rotations=DEFAULT | YARN,
    repeats={"num_key_value_heads": "num_attention_heads"},
    stated=("num_experts",),
    not_null=("num_experts", "head_dim"),
    facts=partial(llama_facts, qk_norm=True, norm_over_heads=True),
    balance=Balance("router_aux_loss_coef"),
    releases={"allenai/OLMoE-1B-7B-0924": 6.9},
)
