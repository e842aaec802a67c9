"""Check that Megatron's model computes the function that a config.json describes, by Megatron-Bridge 0.6.2.

    unread(config) -> ["num_experts is ...", ...]      a line for each key that would not reach Megatron's model

Each key is compared with the model's family (conf/families/parts/family.py explains its tables) and with:

    LEFT        keys that do not change logits (conf/tables/keys_without_effect.yaml)
    OF_ALL      keys assumed for every family: transformers reads them in any config.json

A key that is absent, or null, has the default of transformers 5.12. tests/trainer/test_function.py compares each entry
with the logits of transformers, and the tables with its classes.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from conf import families, strict_yaml
from conf.families.parts.family import ANY, Family, Rotation
from conf.model_files import config_json
from contract.json_object import show

BRIDGE = "0.6.2"  # the release of Megatron-Bridge that the tables were read from
LEFT = {key for keys in strict_yaml.table("keys_without_effect").values() for key in keys}
PREFIXES = ("_", "unsloth_")  # of keys that tools add for their own use
OF_LAYERS = {"layer_types": "full_attention", "attn_type_list": 1}  # the only kind of layer that Megatron-Bridge builds
LOCAL = "sliding_attention"
WINDOWS = {"sliding_window", "max_window_layers"}  # without effect while use_sliding_window is false
OF_ALL: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,)}  # false: every token attends to later ones
FIRST_DENSE = "mlp_layer_types"  # of GLM-4.7-Flash


def unread(config: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Return lines for keys that would not reach Megatron's model, for a family that is converted here.

    `ignored` are keys that do not matter to the user.
    """
    family, config = families.of({**config}), config_json.of_text({**config})
    found = [*_unread(config, family), *_rotation(config, family), *_routing(config, family)]
    return [f"{key} is {text}" for key, text in found if key.partition(".")[0] not in ignored and key not in ignored]


def _unread(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    for key in family.stated:
        if key not in config and family.renamed.get(key) not in config:
            yield key, "absent, but the defaults of transformers and Megatron-Bridge differ; add it"
    for key in family.not_null:
        if key in config and config[key] is None:
            yield key, f"null, which cannot be converted for {_name(config)}; set a value"
    builds = f"but Megatron-Bridge builds {_name(config)} with"
    only = {**OF_ALL, **family.assumed}
    for key, value in config.items():
        if key in family.repeats and value is not None:
            if value != config.get(family.repeats[key], value):
                yield key, f"{show(value)}, {builds} the value of {family.repeats[key]}"
        elif key in only:
            if value is not None and not _among(value, only[key]):
                yield key, f"{show(value)}, {builds} {show(only[key][0])} only"
        elif key in OF_LAYERS and key in family.read:
            continue
        elif key in OF_LAYERS and family.layer_turns:
            if value and value != [family.layer_turns[n % len(family.layer_turns)] for n in range(_layers(config))]:
                yield key, f"{show(value)}, {builds} {_pattern(family.layer_turns)}"
        elif key in OF_LAYERS:
            if value and not (isinstance(value, list) and all(kind == OF_LAYERS[key] for kind in value)):
                yield key, f"{show(value)}, {builds} {OF_LAYERS[key]} only"
        elif key == FIRST_DENSE:
            if value and value != ["dense", *["sparse"] * (_layers(config) - 1)]:
                yield key, f"{show(value)}, {builds} experts in all layers except the first"
        elif key in WINDOWS and "use_sliding_window" in only:
            continue
        elif not (key in family.read or key in LEFT or key.startswith(PREFIXES) or _says_nothing(value)):
            yield key, f"{show(value)}, which Megatron-Bridge does not read for {_name(config)}"


def _rotation(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    """Check rotary scaling. transformers takes rope_scaling, the older name, if both are present."""
    if not family.rotations:  # learned positions
        return
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        yield key, f"{show(scaling)}, which is not an object"
    elif not family.local_rotations or key == "rope_scaling":
        yield from _scaling(key, scaling, config, family, family.rotations)
    else:
        local, other = LOCAL, OF_LAYERS["layer_types"]
        for name, part in scaling.items():
            if name in (local, other) and isinstance(part, dict):
                right = family.local_rotations if name == local else family.rotations
                yield from _scaling(f"{key}.{name}", part, config, family, right)
            elif not _says_nothing(part):
                yield f"{key}.{name}", f"{show(part)}, but transformers reads objects for {local} and {other} only"


def _scaling(
    key: str, scaling: dict[str, Any], config: Mapping[str, Any], family: Family, rotations: Mapping[str, Rotation]
) -> Iterator[tuple[str, str]]:
    """Check the scaling of all layers, or of layers of one kind."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rotation = rotations.get(kind) if isinstance(kind, str) else None
    if rotation is None:
        reads = f"it reads {', '.join(rotations)}"
        yield f"{key}.rope_type", f"{show(kind)}, which Megatron-Bridge does not read for {_name(config)}; {reads}"
        return
    if scaling.get("type", kind) not in (kind, None):
        yield f"{key}.type", f"{show(scaling['type'])}, which Megatron-Bridge reads, but rope_type is {show(kind)}"
    factor = "partial_rotary_factor"
    share = config[factor] if config.get(factor) is not None else family.defaults.get(factor, 1)
    if "rotary_dim" in family.read and config.get("rotary_dim") and config.get("head_dim"):
        share = config["rotary_dim"] / config["head_dim"]
    right = {"rope_type": ANY, "type": ANY, "rope_theta": ANY, factor: (share,)} | dict(rotation.read)
    for name, value in scaling.items():
        if value is None or right.get(name) is ANY:
            continue
        if name not in right and name not in rotation.lost and _says_nothing(value):
            continue
        if name not in right:
            yield f"{key}.{name}", f"{show(value)}, which Megatron-Bridge does not read for {_name(config)}"
        elif not _among(value, right[name]):
            yield f"{key}.{name}", f"{show(value)}, but Megatron computes only with {show(right[name][0])}"
    for name in rotation.needs:
        if scaling.get(name) is None:
            yield f"{key}.{name}", "absent, but the defaults of Megatron and transformers differ; add it"
    if "mscale" in rotation.read and bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        yield f"{key}.mscale", "present without mscale_all_dim or the other way round: Megatron would scale differently"


def _routing(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    """Check the routing of tokens to experts.

    With one expert per token, Megatron keeps its weight; with several it scales the weights to a sum of 1.
    transformers ranks groups by the sum of their best 2 experts, Megatron by the sum of the best top_k / topk_group.
    """
    keys = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
    each = keys.get("num_experts_per_tok", 0)
    if each == 1 and True in (keys.get("norm_topk_prob"), "n_group" in family.defaults):
        yield ("num_experts_per_tok", "1, but Megatron makes the weights sum to 1 only for several experts")
    groups, kept = keys.get("n_group", 0), keys.get("topk_group", 0)
    sizes = "n_group" in family.defaults and all(type(size) is int and size > 0 for size in (groups, kept, each))
    if sizes and groups != kept and each // kept != 2:
        text = f"by their best {each // kept} experts instead of 2"
        yield "topk_group", f"{kept}, but Megatron would rank the {groups} groups {text}"


def _pattern(turns: tuple[str, ...]) -> str:
    return " and ".join(f"{turns.count(kind)} {kind}" for kind in dict.fromkeys(turns)) + " in turn"


def _layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers; 0 if the key is not a number, which conf/model_facts.py reports."""
    count = config.get("num_hidden_layers")
    return count if type(count) is int else 0


def _says_nothing(value: Any) -> bool:
    return isinstance(value, str) or value in (None, False, 0, [], {}) or (type(value) is not bool and value == 1)


def _among(value: Any, right: tuple[Any, ...]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in right)


def _name(config: Mapping[str, Any]) -> str:
    return config["architectures"][0]
