"""Sizes and kinds of layers of a model, read from its config.json.

    facts_from_hf(config)    facts of a config.json; a ValueError of one line if it does not describe a model
    shapes(config, names)    shape of each released tensor, by name

Counts are exact for the families in conf/families/. Others are read by the names in conf/families/parts/keys.py.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf import families
from conf.families.parts.keys import Keys, check, check_rotations
from conf.families.parts.sizes import ModelFacts as ModelFacts
from conf.model_files import config_json, quantization
from conf.model_files.config_json import TIED
from contract.json_object import show

MODELS = Path(__file__).parent / "models"  # NAME.json: {"source": its origin, "config": its config.json, trimmed}


def facts_from_hf(config: dict[str, Any]) -> ModelFacts:
    config_json.check(config)
    family, architecture = families.of(config), config_json.architecture(config)
    tied = config.get(TIED, family.defaults.get(TIED, False))
    if (text := config.get("text_config", {}).get(TIED, tied)) != tied:
        raise ValueError(f"config.json: {TIED} is {show(tied)}, but {show(text)} in text_config")
    config = config_json.of_text(config)
    for key, value in family.fixed.items():
        if config.get(key, value) not in (value, None):
            builds = f"Megatron-Bridge builds {architecture} only with {value!r}"
            raise ValueError(f"config.json: {key} is {config[key]!r}, but {builds}")
    facts = family.facts(Keys(config))
    check(facts)
    check_rotations(config, facts)
    return replace(facts, architecture=architecture, **_packed(config))


def by_layer(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json with a value for each layer."""
    layers = facts_from_hf(config).layers
    found = {key: value for key, value in config.items() if isinstance(value, list) or key in config_json.PER_LAYER}
    return {key: value for key, value in found.items() if value and len(value) == layers > 1}


def first_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the config.json of a model's first layers."""
    family = families.of(config)
    cut = {key: value[:layers] for key, value in by_layer(config).items()} | family.cut(config, layers)
    return config | cut | {family.key("num_hidden_layers"): layers}


def shapes(config: dict[str, Any], names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by the names of a release or, without `names`, by the usual ones."""
    family, keys = families.of(config), Keys(config_json.of_text(config))
    return {name: tensor.shape for name, tensor in family.tensors(family.facts(keys), names).items()}


def _packed(config: dict[str, Any]) -> dict[str, Any]:
    try:
        scheme = quantization.scheme(config)
    except ValueError:  # reported by conf/rules/conversion.py
        return {}
    if scheme is None:
        return {}
    scale = {"mxfp4": 1, "nvfp4": 1, "fp8": 4}.get(scheme.kind, 2) / (scheme.block[0] * scheme.block[1])
    experts_only = any("self_attn" in name for name in scheme.unquantised)
    return {"packed": scheme.bits / 8 + scale, "packed_experts": experts_only}
