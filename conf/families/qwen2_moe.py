"""Qwen1.5-MoE and Qwen2-57B-A14B: experts, and a shared expert whose weight for each token comes from a gate.

The releases have no mlp_only_layers. The tiny model has one, to test a dense layer.
"""

from functools import partial

from conf.families.parts import tensors
from conf.families.parts.family import DEFAULT, EXPERTS, HEADS, PLAIN, QWENS, YARN, Balance, Family, Serving
from conf.families.parts.keys import Keys, llama_facts
from conf.families.parts.sizes import ModelFacts

SHARED = "shared_expert_intermediate_size"


def facts(keys: Keys) -> ModelFacts:
    return llama_facts(keys, shared_gate=True, attention_bias=keys.config.get("qkv_bias", True) is not False)


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    read=PLAIN
    | EXPERTS
    | {"num_experts", SHARED, "norm_topk_prob", "qkv_bias"}
    | {"decoder_sparse_step", "mlp_only_layers"},
    assumed=QWENS,
    rotations=DEFAULT | YARN,
    stated=("num_key_value_heads", "moe_intermediate_size", "num_experts", SHARED),
    not_null=(*HEADS, "moe_intermediate_size", "num_experts", SHARED, "norm_topk_prob", "qkv_bias"),
    facts=facts,
    layer=partial(tensors.layer, shared="shared_expert"),
    balance=Balance("router_aux_loss_coef"),
    serving=Serving(packed=True),
    releases={"Qwen/Qwen2-57B-A14B-Instruct": 57.4},
)
