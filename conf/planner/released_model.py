"""Check that config.json, weights and tokenizer of a released model belong together."""

import re
from pathlib import Path
from typing import Any

from conf import families
from conf.model_facts import ModelFacts, facts_from_hf
from conf.model_files import config_json, quantization, tokenizer_files, weights
from conf.model_files.weights import Entry
from conf.planner import parameters
from conf.rules.conversion import not_converted
from contract.faults import Fault, named
from contract.json_object import show

EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")
FLOATING = ("BF16", "F16", "F32", "F64")
WEIGHTS = ("weight", "proj", "_bias")  # other tensors may be masks


def check(folder: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Return config.json and tensors of a folder that can be served. Raise a Fault that names any damage."""
    config = config_json.read(folder / config_json.NAME)
    if not config_json.architecture(config):
        raise Fault(f"{folder / config_json.NAME}: architectures is missing, so the kind of model is unknown")
    tensors = weights.tensors(folder)
    rows = config.get("vocab_size")
    tokenizer_files.check(folder, rows if type(rows) is int else None)
    return config, tensors


def check_released(folder: Path) -> tuple[dict[str, Any], ModelFacts]:
    """Return config.json and facts of a folder. Raise a Fault if its model cannot be converted and trained here."""
    config, tensors = check(folder)
    place = folder / config_json.NAME
    if refused := not_converted(config):
        raise Fault(f"{place}: {refused}")
    try:
        facts = facts_from_hf(config)
    except ValueError as error:  # a line that begins with config.json
        raise Fault(f"{folder}/{error}") from None
    _check_types(folder, config, tensors)
    _check_sizes(place, facts, config, tensors)
    return config, facts


def _check_types(folder: Path, config: dict[str, Any], tensors: dict[str, Entry]) -> None:
    """Check that weights are floating-point numbers. Integers would be converted to floats without an error."""
    if config.get(quantization.KEY):
        return  # codes and scales are checked one by one
    for name, entry in tensors.items():
        if entry.dtype not in FLOATING and not entry.dtype.startswith("F8") and name.endswith(WEIGHTS):
            what = f"tensor {show(name)} is of {entry.dtype}, but weights must be of {', '.join(FLOATING)}"
            raise Fault(f"{folder / entry.file}: {what}; download it again")


def _check_sizes(place: Path, facts: ModelFacts, config: dict[str, Any], tensors: dict[str, Entry]) -> None:
    """Check the sizes before a model is built. Otherwise Megatron would spend memory and time on wrong sizes."""
    family = families.of(config)
    layers = {layer for layer in map(weights.layer_of, tensors) if layer is not None}
    most = facts.layers + facts.mtp_layers
    if not layers or not facts.layers <= max(layers) + 1 <= most:
        text = f"{family.key('num_hidden_layers')} is {facts.layers}"
        if facts.mtp_layers:
            text += f" and {family.key('num_nextn_predict_layers')} {facts.mtp_layers}"
        raise Fault(f"{place}: {text}, but the weights have {max(layers, default=-1) + 1} layers")
    experts = {int(match[1]) for match in map(EXPERT.search, tensors) if match}
    if experts and max(experts) + 1 != facts.experts:
        raise Fault(f"{place}: describes layers of {facts.experts} experts, but the weights have {max(experts) + 1}")
    name = family.embedded(tensors)
    if name in tensors and tensors[name].shape != (facts.vocab, facts.hidden):
        text = f"vocab_size is {facts.vocab} and {family.key('hidden_size')} {facts.hidden}"
        raise Fault(f"{place}: {text}, but {name} is {list(tensors[name].shape)}")
    with named(place.parent, ValueError):
        described, present = parameters.total(facts), quantization.parameters(config, tensors)
    if not present / 2 <= described <= 2 * present:
        raise Fault(f"{place}: describes a model of {described:,} parameters, but the weights have {present:,}")
