"""The text model of Qwen3.5, dense, as transformers saves it. vLLM 0.26 has no class for it."""

from conf.families import qwen3_5, qwen3_5_moe

FAMILY = qwen3_5_moe.text_model(qwen3_5.FAMILY, "Qwen3_5ForCausalLM")
