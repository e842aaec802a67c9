"""Qwen3.5 and 3.6, dense: like the models with experts, with one MLP in each layer."""

from dataclasses import replace

from conf.families import qwen3_5_moe
from conf.families.parts.family import HEADS, PLAIN
from conf.families.parts.keys import delta_facts
from conf.families.qwen3_next import NETS

FAMILY = replace(
    qwen3_5_moe.FAMILY,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    read_as="qwen3_5_text",
    read=PLAIN | {*NETS, *qwen3_5_moe.GATED},
    stated=(*HEADS, *NETS),
    not_null=(*HEADS, *NETS, "full_attention_interval"),
    defaults={"partial_rotary_factor": 0.25},
    facts=delta_facts,
    balance=None,
    releases={},
)
