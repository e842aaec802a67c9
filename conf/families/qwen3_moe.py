"""Qwen3 with experts in every layer."""

from functools import partial

from conf.families.parts.family import DEFAULT, EXPERTS, HEADS, PLAIN, QWENS, YARN, Balance, Family, Serving
from conf.families.parts.keys import llama_facts

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read=PLAIN
    | EXPERTS
    | {"num_experts", "num_local_experts", "norm_topk_prob"}
    | {"attention_bias", "decoder_sparse_step", "mlp_only_layers"},
    assumed=QWENS,
    fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    rotations=DEFAULT | YARN,
    stated=("moe_intermediate_size", "num_experts"),
    renamed={"num_experts": "num_local_experts"},
    not_null=(
        *HEADS,
        "intermediate_size",
        "moe_intermediate_size",
        "num_experts",
        "num_local_experts",
        "norm_topk_prob",
    ),
    facts=partial(llama_facts, qk_norm=True),
    balance=Balance(always=True),
    serving=Serving(packed=True),
    gguf="qwen3moe",
    releases={"Qwen/Qwen3-30B-A3B": 30.5, "Qwen/Qwen3-235B-A22B": 235.0},
)
