"""MiniMax-M2: experts in every layer, chosen by sigmoid scores and a bias, and norms over all heads together.

intermediate_size is the width of an expert. Half of each head is rotated, also in the tiny model.
"""

from functools import partial

from conf.families.parts import tensors
from conf.families.parts.family import DEFAULT, HEADS, PLAIN, SILU, Balance, Family, Serving
from conf.families.parts.keys import llama_facts

ON_CPU = "scoring_func: on a CPU vLLM supports sigmoid scores only for groups of experts, and MiniMax-M2 has no groups"
EXPERTS_IN = "vLLM names MiniMax-M2's experts block_sparse_moe, but adapters from transformers name them mlp"

FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    read=PLAIN
    | {"num_local_experts", "num_experts_per_tok", "rotary_dim"}
    | {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"},  # the releases have no tensors for these keys
    assumed=SILU
    | {"router_jitter_noise": (0,), "scoring_func": ("sigmoid",), "use_routing_bias": (True,)}
    | {"use_qk_norm": (True,), "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)},
    rotations=DEFAULT,
    defaults={"norm_topk_prob": True},
    # required because Megatron-Bridge rotates the whole head without rotary_dim and head_dim
    stated=("rotary_dim", *HEADS, "num_local_experts"),
    not_null=(*HEADS, "num_local_experts", "rope_theta"),
    facts=partial(llama_facts, qk_norm=True, norm_over_heads=True, expert_bias=True),
    layer=partial(tensors.layer, mlp="block_sparse_moe", leaves=("w1", "w3", "w2"), bias="e_score_correction_bias"),
    by_name=True,
    balance=Balance("router_aux_loss_coef", moves_bias=True),
    serving=Serving(on_cpu=ON_CPU, expert_adapters=EXPERTS_IN, packed=True),
)
