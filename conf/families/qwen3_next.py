"""Qwen3-Next: gated delta nets in three of four layers, gated attention in the fourth, and experts in every layer.

The releases have a multi-token-prediction layer (mtp.*), but no key for it in config.json. It is trained if config.json
has num_nextn_predict_layers 1; otherwise an export copies it.
"""

from functools import partial

from conf.families.parts import tensors
from conf.families.parts.family import DEFAULT, EXPERTS, HEADS, PLAIN, SILU, Balance, Family, Serving
from conf.families.parts.keys import delta_facts

SHARED = "shared_expert_intermediate_size"
NETS = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
NETS += ("linear_conv_kernel_dim",)
STATED = (*HEADS, *NETS, "intermediate_size", "moe_intermediate_size", "num_experts", SHARED)
CONSTANTS = {"linear_attn.norm.weight": 1.0, "norm.weight": 0.0, "dt_bias": 1.0}
CONSTANTS |= {"pre_fc_norm_embedding.weight": 0.0, "pre_fc_norm_hidden.weight": 0.0}

FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    read=PLAIN
    | EXPERTS
    | {*NETS, "layer_types", "full_attention_interval", "partial_rotary_factor", "num_experts", SHARED}
    | {"decoder_sparse_step", "mlp_only_layers", "attention_bias", "num_nextn_predict_layers"},
    assumed=SILU | {"norm_topk_prob": (True,)},
    fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    rotations=DEFAULT,
    stated=STATED,
    not_null=(*STATED, "norm_topk_prob", "full_attention_interval"),
    defaults={"partial_rotary_factor": 0.25},
    facts=partial(delta_facts, shared_gate=True),
    layer=partial(tensors.layer, shared="shared_expert", ahead=tensors.AHEAD),
    balance=Balance("router_aux_loss_coef"),
    serving=Serving(on_cpu="vLLM computes gated delta nets on a CPU in bf16 alone", packed=True),
    ahead="mtp.",
    constants=CONSTANTS,
    releases={"Qwen/Qwen3-Next-80B-A3B-Instruct": 81.3},
)
