"""Unsupported models: the reason, and the supported release of the nearest size as an alternative.

    reason(architecture) -> "Megatron-Bridge 0.6 has no bridge for it"       more reasons: conf/tables/unsupported.yaml
    closest(config) -> "the closest supported model ... is Qwen/Qwen3-4B"

Sizes are rounded billions of parameters. The size of the unsupported model is an estimate from its config.json.
"""

from itertools import chain
from math import log
from typing import Any

from conf import families, strict_yaml
from conf.model_facts import facts_from_hf

_TABLE = strict_yaml.table("unsupported")
REFUSED = {architecture: row["reason"] for row in _TABLE["refused"] for architecture in row["architectures"]}
BRIDGED = set(_TABLE["bridged"])
UNTRIED = (
    "Megatron-Bridge 0.6 has a bridge for it, but nobody compared the trained and exported model with transformers"
)


def reason(architecture: str) -> str:
    """Return the reason why a model of this architecture is not converted or trained here."""
    if known := REFUSED.get(architecture):
        return known
    if architecture.endswith("ForConditionalGeneration"):
        return "it reads more than text, and only text models are trained here"
    if architecture in BRIDGED:
        return UNTRIED
    return "Megatron-Bridge 0.6 has no bridge for it" if architecture else "its family is unknown"


def closest(config: dict[str, Any]) -> str:
    size, has_experts = _size(config)
    if not size:
        return "take Qwen/Qwen3-8B, or Qwen/Qwen3-30B-A3B for a model with experts"
    sizes = releases(has_experts)
    name = min(sizes, key=lambda release: abs(log(sizes[release] / size)))
    kind = " with experts" if has_experts else ""
    about = f"it has about {size:.2g} billion parameters"
    return f"{about}, and the closest supported model{kind} is {name}, which has {sizes[name]:g} billion"


def releases(has_experts: bool) -> dict[str, float]:
    """Return releases of the dense families, or of the families with experts, with their billions of parameters."""
    same = [family for family in families.every().values() if (family.balance is not None) == has_experts]
    return {name: size for family in same for name, size in family.releases.items()}


def _size(config: dict[str, Any]) -> tuple[float, bool]:
    """Return billions of parameters (0 if config.json has other names for sizes), and whether there are experts."""
    of_text = config.get("text_config")  # a multimodal model keeps the sizes of its text model here
    of_text = config | of_text if isinstance(of_text, dict) else config
    try:  # transformers omits this key if the embedding is also the output layer
        facts = facts_from_hf({"tie_word_embeddings": True} | of_text)
    except (ValueError, TypeError, AttributeError):
        return 0.0, False
    of_layers = (families.layer(facts, kind) for kind in facts.kinds)
    parts = chain(*families.named(facts.architecture).ends(facts), *of_layers)
    return sum(tensor.size for tensor in parts) / 1e9, facts.experts > 0
