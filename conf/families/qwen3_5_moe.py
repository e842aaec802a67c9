"""Qwen3.5 and 3.6 with experts: the text model of a model that also reads images. Its layers are those of Qwen3-Next.

config.json has the keys of the text model in text_config. An export copies the vision tower of a release. Releases have
one tensor for all experts of a layer; transformers 5 writes one for each expert. The multi-token-prediction layer of
Qwen3.5 has one for each expert too, that of Qwen3.6 one for all.
"""

from dataclasses import replace
from functools import partial

from conf.families.parts import tensors
from conf.families.parts.family import ANY, EXPERTS, HEADS, PLAIN, SILU, Balance, Family, Rotation, Serving
from conf.families.parts.keys import delta_facts
from conf.families.qwen3_next import CONSTANTS, NETS, SHARED

GATED = {"layer_types", "full_attention_interval", "partial_rotary_factor", "attention_bias", "mtp_num_hidden_layers"}
# Sections are of positions in images; those of text are all alike.
ROTARY = {"mrope_section": ANY, "mrope_interleaved": ANY, "partial_rotary_factor": ANY}
STATED = (*HEADS, *NETS, "moe_intermediate_size", "num_experts", SHARED)

FAMILY = Family(
    architecture="Qwen3_5MoeForConditionalGeneration",
    model_type="qwen3_5_moe",
    read_as="qwen3_5_moe_text",
    read=PLAIN | EXPERTS | {*NETS, *GATED, "num_experts", SHARED},
    assumed=SILU | {"attn_output_gate": (True,)},
    fixed={"attention_bias": False},
    rotations={"default": Rotation(ROTARY)},
    stated=STATED,
    not_null=(*STATED, "full_attention_interval"),
    defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True},
    facts=partial(delta_facts, shared_gate=True),
    layer=partial(tensors.layer, shared="shared_expert", fused=False, ahead=tensors.AHEAD),
    roots=("model.language_model.", "model."),
    balance=Balance("router_aux_loss_coef"),
    serving=Serving(on_cpu="vLLM computes gated delta nets on a CPU in bf16 alone", packed=True),
    megatron="trainer.megatron.bridges.qwen3_5",
    names={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
    ahead="mtp.",
    copied=("model.visual.",),
    constants=CONSTANTS,
    releases={"Qwen/Qwen3.5-35B-A3B": 34.7},
)


def text_model(family: Family, architecture: str) -> Family:
    """Return the family of the text model alone, as transformers saves it."""
    own = {"architecture": architecture, "model_type": family.read_as, "read_as": "", "roots": family.roots[::-1]}
    return replace(family, **own, by_name=True, serving=None, releases={})
