"""Mixtral: a Llama with experts in every layer. intermediate_size is the width of an expert."""

from functools import partial

from conf.families.parts import tensors
from conf.families.parts.family import DEFAULT, PLAIN, SILU, YARN, Balance, Family, Serving

EXPERTS_IN = "vLLM names Mixtral's experts block_sparse_moe, but adapters from transformers name them mlp"

FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read=PLAIN | {"num_local_experts", "num_experts_per_tok"},
    assumed=SILU | {"sliding_window": (None,), "router_jitter_noise": (0,)},
    rotations=DEFAULT | YARN,
    defaults={"norm_topk_prob": True},
    stated=("num_key_value_heads", "num_local_experts"),
    not_null=("num_key_value_heads", "num_local_experts"),
    layer=partial(tensors.layer, mlp="block_sparse_moe", leaves=("w1", "w3", "w2")),
    balance=Balance("router_aux_loss_coef"),
    serving=Serving(expert_adapters=EXPERTS_IN, packed=True),
)
