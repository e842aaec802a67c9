"""The supported release to take in place of a model that is not converted here: as near in size as there is one.

    closest(config) -> "the closest supported model ... is Qwen/Qwen3-4B"

Sizes are rounded billions of parameters. That of the model is an estimate by its config.json, if it has sizes.
"""

from math import log
from typing import Any

from conf.model_facts import facts_from_hf

DENSE = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.49,
    "meta-llama/Llama-3.2-1B-Instruct": 1.24,
    "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "meta-llama/Llama-3.1-70B-Instruct": 70.6,
    "meta-llama/Llama-3.1-405B-Instruct": 406.0,
}
OF_EXPERTS = {
    "allenai/OLMoE-1B-7B-0924": 6.9,
    "openai/gpt-oss-20b": 20.9,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen2-57B-A14B-Instruct": 57.4,
    "zai-org/GLM-4.5-Air": 110.0,
    "Qwen/Qwen3-235B-A22B": 235.0,
    "zai-org/GLM-4.7": 358.0,
    "deepseek-ai/DeepSeek-V3-0324": 684.0,
    "moonshotai/Kimi-K2-Instruct": 1026.0,
}


def closest(config: dict[str, Any]) -> str:
    size, has_experts = _size(config)
    if not size:
        return "take Qwen/Qwen3-8B, or Qwen/Qwen3-30B-A3B for a model with experts"
    releases = OF_EXPERTS if has_experts else DENSE
    name = min(releases, key=lambda one: abs(log(releases[one] / size)))
    kind = " with experts" if has_experts else ""
    about = f"it has about {size:.2g} billion parameters"
    return f"{about}, and the closest supported model{kind} is {name}, which has {releases[name]:g} billion"


def _size(config: dict[str, Any]) -> tuple[float, bool]:
    """Billions of parameters, and whether it has experts; 0 if its config.json has other names for its sizes."""
    of_text = config.get("text_config")  # of a model that reads pictures, too
    of_text = config | of_text if isinstance(of_text, dict) else config
    try:  # transformers leaves the key out if the embedding is the output layer, too
        facts = facts_from_hf({"tie_word_embeddings": True} | of_text | {"architectures": None})
    except (ValueError, TypeError, AttributeError):
        return 0.0, False
    attention = 2 * facts.hidden * (facts.heads + facts.kv_heads) * (facts.head_dim or facts.v_head)
    mlps = {"dense": facts.ffn, "moe": facts.experts * facts.expert_ffn + facts.shared_ffn}
    layers = sum(attention + 3 * facts.hidden * mlps[kind] for kind in facts.kinds)
    return (layers + facts.vocab * facts.hidden * (1 if facts.tied else 2)) / 1e9, facts.experts > 0
