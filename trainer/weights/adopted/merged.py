"""Merge of an adapter in PEFT's format into the weights of a model: LoRA, DoRA, saved modules and trained tokens."""

from functools import partial
from pathlib import Path

import torch

from conf import peft_adapter
from conf.model_files import config_json
from conf.peft_adapter import Adapter
from trainer.weights import low_rank
from trainer.weights.adapter_file import AdapterFile
from trainer.weights.adopted.files import Made

KEY = "model.merge_adapter"


def tensors(source: Path, folder: Path, weights: dict[str, Made]) -> dict[str, Made]:
    """Return the tensors with the adapter merged."""
    adapter = peft_adapter.read(folder, config_json.read(source / config_json.NAME), weights, KEY)
    file = AdapterFile(adapter)
    changed = {name for name, _ in adapter.changes} | adapter.values.keys() | adapter.rows.keys()
    made = {
        name: Made(weights[name].dtype, weights[name].shape, partial(_merged, adapter, file, name, weights[name]))
        for name in changed
    }
    return weights | made


def _merged(adapter: Adapter, file: AdapterFile, name: str, before: Made) -> torch.Tensor:
    saved = adapter.values.get(name)
    weight = file.tensor(saved).to(before.dtype) if saved else before.make()
    if name in adapter.rows:
        key, numbers = adapter.rows[name]
        weight = weight.index_copy(0, torch.tensor(numbers), file.tensor(key).to(weight.dtype))
    if (name, None) in adapter.changes:
        return _changed(adapter, file, (name, None), weight)
    if (name, 0) in adapter.changes:
        return torch.stack([_changed(adapter, file, (name, i), expert) for i, expert in enumerate(weight)])
    return weight


def _changed(adapter: Adapter, file: AdapterFile, weight: peft_adapter.Weight, before: torch.Tensor) -> torch.Tensor:
    change, turned = adapter.changes[weight], adapter.tensors[weight[0]].turned
    a, b = file.factors(change)
    magnitude = file.tensor(change.magnitude).flatten() if change.magnitude else None
    matrix = before.t() if turned else before
    blocks = low_rank.Change(a, b, change.scale, magnitude).blocks(matrix)
    result = torch.cat([block.clone() for block in blocks])
    return result.t().contiguous() if turned else result
