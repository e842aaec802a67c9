"""Check of an adapter's file against its base, by the headers of both: no layer, no matrix and no expert is missing.

vLLM serves an adapter that lacks a layer without it. It cuts the matrices of all experts into equal parts, so with one
expert missing, all others would get parts of their neighbours.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from conf.model_facts import facts_from_hf
from conf.model_files import config_json, safetensors_header, weights
from contract import json_object
from contract.faults import Fault
from trainer.serving.unmerged import CONFIG, EXPERTS, WEIGHTS

LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
# An MTP layer (mtp.layers.0) is not the layer of this number.
PLACE = re.compile(r"(?:^|\.)(?<!mtp\.)(?:layers|h)\.(?P<layer>\d+)\.(?P<kind>.+)")


def require_whole(folder: Path, model: Path) -> None:
    """Raise a Fault for an adapter of another shape, or one that lacks a part that its config announces."""
    config, tensors = json_object.read(folder / CONFIG), safetensors_header.read(folder / WEIGHTS)
    facts = facts_from_hf(config_json.read(model / config_json.NAME))
    parts: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := LORA.fullmatch(name):
            parts[match["module"]][match["part"]] = tensor.shape
    for module, shapes in parts.items():
        experts = facts.experts if module.removesuffix(".base_layer").endswith(f".{EXPERTS}") else 1
        needed = config["r"] * experts
        ranks = (shapes["A"][0], shapes["B"][1]) if shapes.keys() == {"A", "B"} else None
        if ranks != (needed, needed):
            of = f" of {experts} experts" if experts > 1 else ""
            rows = f"{ranks[0]} and {ranks[1]}" if ranks else f"only lora_{''.join(shapes)}"
            raise Fault(f"{folder}: {module}: an adapter of rank {config['r']}{of} has {needed} rows, this has {rows}")
    adapted = {place for module in parts if (place := _place(module))}
    if missing := sorted(_announced(config, model, facts.layers) - adapted):
        layer, kind = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise Fault(f"{folder}: layer {layer} has no adapter of {kind}{more}, which {CONFIG} announces")


def _announced(config: dict[str, Any], model: Path, layers: int) -> set[tuple[int, str]]:
    """Return the layers and modules of the base that PEFT's rule selects: equal to a target, or ending with it."""
    targets = [*(config.get("target_modules") or ()), *(config.get("target_parameters") or ())]
    targets = {_stack(target.removesuffix(".weight")) for target in targets}
    whole = {place for target in targets if (place := _place(target))}
    modules = {tensor.rpartition(".")[0] for tensor in weights.tensors(model)}
    places = {place for module in modules if (place := _place(module)) and place[0] < layers}
    return {place for place in places if place in whole or any(f".{place[1]}".endswith(f".{end}") for end in targets)}


def _place(module: str) -> tuple[int, str] | None:
    """Return the number of the layer, and the module in it."""
    match = PLACE.search(module.removesuffix(".base_layer"))
    return (int(match["layer"]), _stack(match["kind"])) if match else None


def _stack(module: str) -> str:
    """Return the module; for a part of experts, the module of all experts, by transformers' name."""
    return re.sub(rf"(\.{EXPERTS})\..+", r"\1", module.replace("block_sparse_moe", "mlp"))
