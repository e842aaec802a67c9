"""Checks of config.json: the architecture that it names, and types and ranges of keys that all families share.

    read(path) -> dict             a checked config.json; a Fault for any other file
    check(config)                  raises a ValueError of one line that begins with config.json
    of_text(config)                its keys for the text model: those of text_config too, if the model reads more
    architecture(config) -> str    the first architecture; "" if the config.json names none

conf/model_facts.py checks sizes and their limits. Keys without an entry here may have any value.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

from conf import strict_yaml
from conf.model_files import weights
from contract import json_object
from contract.faults import Fault
from contract.json_object import show

NAME = "config.json"
# Number of MTP layers by model_type, or for others, and their names in the files.
AHEAD, OTHERS, OF_AHEAD = {"nemotron_h": "num_nextn_predict_layers"}, "mtp_num_hidden_layers", re.compile(r"mtp\.")
LONGEST = 200  # characters of an architecture's name

Test = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def _integer(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**31


def _ids(value: Any) -> bool:
    return _integer(value) or (isinstance(value, list) and bool(value) and all(map(_integer, value)))


# By kind: the error text, and the test that a value must pass.
KINDS: dict[str, tuple[str, Test]] = {
    "part": ("not a number above 0 and below 1", lambda value: _number(value) and 0 < value < 1),
    "positive": ("not a number above 0", lambda value: _number(value) and 0 < value < 1e30),
    "share": ("not a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1),
    "flag": ("neither true nor false", lambda value: type(value) is bool),
    "text": ("not a text", lambda value: isinstance(value, str) and bool(value)),
    "size": ("not a size", lambda value: _integer(value) and value > 0),
    "integer": ("not an integer from 0", _integer),
    "ids": ("neither an id nor a list of ids", _ids),
    "object": ("not an object", lambda value: isinstance(value, dict)),
    "number": ("not a number", _number),
}
KEYS = strict_yaml.table("config_json_keys")
TESTS, ROPE = ({key: KINDS[kind] for kind, keys in KEYS[place].items() for key in keys} for place in ("config", "rope"))
NEEDED = {*KEYS["needed"]}  # keys that cannot be null
TIED = "tie_word_embeddings"
PARTS = ("text_config", "vision_config", "audio_config")  # of a model that reads more than text
PER_LAYER = ("layer_types", "mlp_layer_types", "attn_type_list", "layers_block_type", "hybrid_override_pattern")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read(path: Path) -> dict[str, Any]:
    config = json_object.read(path)
    try:
        check(config)
    except ValueError as error:
        raise Fault(f"{path.parent}/{error}") from None
    config = of_text(config)
    key = AHEAD.get(str(config.get("model_type")), OTHERS)
    if config.get(key) and (names := weights.names(path.parent)) and not any(map(OF_AHEAD.match, names)):
        return config | {key: 0}  # transformers saves the number of these layers, but not the layers
    return config


def of_text(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {key: value for key, value in config.items() if key not in PARTS}
    return {**{key: value for key, value in text.items() if key != TIED}, **whole}


def with_floats(value: Any) -> Any:
    """Return a config.json, or a value, with numbers in place of the objects that transformers writes for Infinity."""
    if isinstance(value, dict):
        tagged = value.keys() == {"__float__"}
        return float(value["__float__"]) if tagged else {key: with_floats(inner) for key, inner in value.items()}
    return [with_floats(inner) for inner in value] if isinstance(value, list) else value


def check(config: dict[str, Any]) -> None:
    architecture(config)
    text = config.get("text_config", {})
    if not isinstance(text, dict):
        raise ValueError(f"{NAME}: text_config is {show(text)}, which is not an object")
    config = of_text(config)
    _check_keys(config, TESTS, "")
    for section in ("rope_scaling", "rope_parameters"):
        scaling = config.get(section) or {}
        parts = {f"{section}.{kind}.": part for kind, part in scaling.items() if isinstance(part, dict)}
        for place, part in ({f"{section}.": scaling} | parts).items():
            _check_keys(part, ROPE, place)
    rows = config.get("vocab_size")
    for key in IDS:
        ids = config.get(key)
        if _integer(rows) and max(ids if isinstance(ids, list) else [ids or 0]) >= rows:
            raise ValueError(f"{NAME}: {key} is {show(ids)}, but vocab_size is {rows}")


def architecture(config: dict[str, Any]) -> str:
    """Return the first architecture in config.json, which transformers and Megatron-Bridge use too."""
    listed = config.get("architectures")
    if listed is None or listed == []:
        return ""
    if not isinstance(listed, list) or not all(map(_is_name, listed)):
        raise ValueError(f"{NAME}: architectures is {show(listed)}, which is not a list of architectures")
    return listed[0]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST and value.isidentifier()


def _check_keys(values: dict[str, Any], tests: dict[str, tuple[str, Test]], place: str) -> None:
    for key in values.keys() & tests.keys():
        error, test = tests[key]
        value = values[key]
        if (value is not None or key in NEEDED) and not test(value):
            raise ValueError(f"{NAME}: {place}{key} is {show(value)}, which is {error}")
