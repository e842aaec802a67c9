"""Tensors of Megatron's torch_dist checkpoint by the names of a release, by Megatron-Bridge's tables.

Megatron-LM, Megatron-Bridge and NeMo 2 write the same tensors; NeMo's names begin with module. Megatron-LM without
Transformer Engine writes the norm before experts as that of their first layer.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from conf.model_facts import shapes
from conf.model_files.weights import Entry
from contract.faults import Fault
from trainer.weights import merge, released, torch_dist
from trainer.weights.adopted.files import NAMES, Made

OF_MODULE = re.compile(r"^(module\.)+")
NORM = re.compile(r"(?P<mlp>.+\.mlp)\.linear_fc1\.layer_norm_(?P<kind>weight|bias)")


def tensors(folder: Path, config: dict, bridge: Any, stored: torch_dist.Stored) -> dict[str, Made]:
    """Return the tensors of Megatron's checkpoint, from the rows of its fused layers."""
    stored = _renamed(stored)
    if adapted := [name for name in stored.places if ".adapter." in name]:
        text = f"has {len(adapted)} tensors of adapters, such as {adapted[0]}"
        raise Fault(f"{stored.folder}: {text}; export it with Megatron-Bridge, and use its adapter as model.adapter")
    registry, provider = bridge._model_bridge.mapping_registry(), bridge.to_megatron_provider(load_weights=False)
    entries = {name: Entry("F32", shape, "", 0, 0) for name, shape in shapes(config).items()}
    model = released.Model(folder, config, entries)
    values = merge.find_values(stored, registry, model, {*released.repeated(model)})
    of_place: dict[str, dict[str, merge.NewValue]] = defaultdict(dict)
    for value in (value for of_weight in values.values() for value in of_weight):
        of_place[value.place.name][value.part.name] = value
    wrong = [
        f"{name} is {list(stored.weights[name].shape)} and should be {list(needed)}"
        for name, of_weight in of_place.items()
        if (needed := _needed(entries, [*of_weight.values()])) != stored.weights[name].shape
    ]
    released.require_none(folder, {released.MISSHAPEN: wrong})
    made = {}
    for name, parts in values.items():
        entry = replace(entries[name], dtype=NAMES[parts[0].place.dtype])
        made[name] = Made(parts[0].place.dtype, entry.shape, partial(_from_parts, parts, stored, provider, entry))
    return made


def _needed(entries: dict[str, Entry], values: list[merge.NewValue]) -> tuple[int, ...]:
    """Return the shape that Megatron's tensor needs to have. A vocabulary may be padded."""
    parts = [value.part.shape(entries[value.part.name].shape) for value in values]
    rows = sum(part[0] for part in parts) if parts[0] else 0
    if values[0].trimmed:
        rows = max(rows, values[0].place.shape[0])
    return (rows, *parts[0][1:]) if parts[0] else ()


def _from_parts(parts, stored: torch_dist.Stored, provider, entry: Entry) -> torch.Tensor:
    tensors = [part.value(stored, provider, entry) for part in parts]
    return tensors[0] if parts[0].part.expert is None else torch.stack(tensors)


def _renamed(stored: torch_dist.Stored) -> torch_dist.Stored:
    """Return the checkpoint by the names of Megatron-Bridge."""
    places = {OF_MODULE.sub("", name): place for name, place in stored.places.items()}
    for name, match in [(name, NORM.fullmatch(name)) for name in places]:
        if match and f"{match['mlp']}.router.weight" in places:
            places[f"{match['mlp'].removesuffix('mlp')}pre_mlp_layernorm.{match['kind']}"] = places.pop(name)
    return replace(stored, places={name: replace(place, name=name) for name, place in places.items()})
