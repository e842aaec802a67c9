"""Qwen3.5 with experts, without vision, as transformers saves its text model. vLLM 0.26 has no class for it."""

from dataclasses import replace

from conf.families import qwen3_5_moe

FAMILY = replace(
    qwen3_5_moe.FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    read_as="",
    by_name=True,
    roots=("model.", "model.language_model."),
    serving=None,
    releases={},
)
