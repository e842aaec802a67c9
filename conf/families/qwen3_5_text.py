"""Qwen3.5, dense and without vision, as transformers saves its text model. vLLM 0.26 has no class for it."""

from dataclasses import replace

from conf.families import qwen3_5

FAMILY = replace(
    qwen3_5.FAMILY,
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    read_as="",
    by_name=True,
    roots=("model.", "model.language_model."),
    serving=None,
    releases={},
)
