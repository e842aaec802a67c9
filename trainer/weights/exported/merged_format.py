"""The merged model in the release's types: the released checkpoint with the trained weights, in the same files.

Each file keeps its header, byte by byte, so every tensor keeps its shape and place. Each tensor is read back after it
is written (parts.py): an untrained weight must have the released checksum, a merged weight must equal a second
computation from the adapter's factors, a new value must be the written one, and every value must be finite.

Weights of a quantised release are unpacked: the file then has a new header, with the same weights in the same order and
no scales. Configuration, tokenizer and chat template are copied, config.json without quantization_config. The model
card is not copied: it describes another model.
"""

# pyright: reportArgumentType=false

import json
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from conf.model_files import config_json, quantization, safetensors_header, weights
from contract import checksums
from contract.faults import Fault
from trainer.weights import released, released_tensors
from trainer.weights.exported import parts
from trainer.weights.exported.parts import Layout
from trainer.weights.mapped.read_rows import ReadRows
from trainer.weights.merge import Adapter
from trainer.weights.released import Entry, Model
from trainer.weights.released_tensors import DTYPES
from trainer.weights.trained import Trained

QUANTISED = "hf_quant_config.json"  # of ModelOpt; with it, vLLM treats a model as quantised
NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"}


@dataclass(frozen=True)
class Merged:
    """Contents of the files, for parts.write()."""

    trained: Trained
    threads: int = parts.THREADS

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        blocks = self.trained.blocks(name)
        unpacked = blocks is None and name in self.trained.model.packed
        return [released_tensors.read(self.trained.model, name)] if unpacked else blocks

    def is_right(self, path: Path, name: str, entry: Entry, written: str) -> bool:
        trained, source = self.trained, self.weight(name)
        if source in trained.values:
            return parts.holds(path, entry, written)
        if source in trained.adapters:
            return holds_merged(trained, source, path, entry, written)
        if source in trained.model.packed or (trained.packed and trained.packed.has(source)):
            return parts.holds(path, entry, written) and parts.is_released(trained, source)
        return released.has_sum(path, entry, trained.sums[name])

    def weight(self, name: str) -> str:
        return self.trained.copies.get(name, name)

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        return self.trained.packed.notes(names) if self.trained.packed else {}


def layouts(model: Model) -> list[Layout]:
    """Return the files of the merged model, without files that contain only scales."""
    files = sorted({model.tensors[model.parts(name)[0]].file for name in model.weights})
    return [_unpacked(model, file) if model.packed else unchanged(model, file) for file in files]


def copy_other_files(model: Model, folder: Path, as_released: bool = False) -> str | None:
    """Copy configuration, tokenizer and chat template. Return the SHA-256 of the chat template, if any."""
    for path in other_files(model):
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).chmod(parts.READABLE)
    if model.packed and not as_released:
        _describe_unpacked(model, folder)
    template = folder / "chat_template.jinja"
    return checksums.of(template.read_bytes()) if template.exists() else None


def other_files(model: Model) -> list[Path]:
    """Return the release's configuration, tokenizer and chat template."""
    files = [path for path in sorted(model.folder.iterdir()) if path.is_file() and path.suffix not in NOT_COPIED]
    return [path for path in files if not path.name.startswith(".") and path.name != QUANTISED]


def holds_merged(trained: Trained, name: str, path: Path, entry: Entry, written: str) -> bool:
    """Whether the file has what was written here, and this is the released weight `name` merged with its adapter.

    The compared bytes are the same that are checksummed: those of the file, and those of the release.
    """
    adapter = trained.adapters[name]
    before = trained.rows(adapter.part) if isinstance(adapter, Adapter) else None
    if before is None or not isinstance(adapter, Adapter):
        from_file = released_tensors.at(path.parent, replace(entry, file=path.name))
        is_there = parts.holds(path, entry, written) and parts.is_released(trained, name)
        return is_there and is_merged(trained, name, from_file)
    from_file = ReadRows(path, entry, DTYPES[entry.dtype], "found")
    try:
        is_right = trained.change(adapter).is_in(from_file, before)
    except Fault:  # one of the files ends early: parts.py reports which
        return False
    return is_right and from_file.has_sum(written) and before.is_recorded


def is_merged(trained: Trained, name: str, found: torch.Tensor) -> bool:
    """Whether this is the released weight `name` merged with its adapter."""
    return all(_is_merged(trained, adapter, adapter.part.of(found)) for adapter in trained.adapters[name].each)


def _is_merged(trained: Trained, adapter: Adapter, found: torch.Tensor) -> bool:
    before = adapter.part.turn(trained.before(adapter.part))
    return trained.change(adapter).is_in(adapter.part.turn(found), before)


def unchanged(model: Model, file: str) -> Layout:
    """Return a released file with its own header."""
    entries = [(name, entry) for name, entry in model.tensors.items() if entry.file == file]
    rows = dict(sorted(entries, key=lambda item: item[1].start))
    with (model.folder / file).open("rb") as f:
        return Layout(file, f.read(next(iter(rows.values())).start), rows)


def _unpacked(model: Model, file: str) -> Layout:
    """Return the file with weights in place of codes."""
    of_codes = {one.codes: name for name, one in model.packed.items()}
    names = [of_codes.get(name, name) for name in unchanged(model, file).rows]
    shapes = {name: (one.dtype, one.shape) for name in names if (one := model.weights.get(name))}
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    places, start = {}, 0
    for name, (dtype, shape) in shapes.items():
        places[name] = start, start + prod(shape) * safetensors_header.BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [*places[name]]}
        _, start = places[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text
    rows = {name: Entry(*shapes[name], file, len(whole) + begin, end - begin) for name, (begin, end) in places.items()}
    return Layout(file, whole, rows)


def _describe_unpacked(model: Model, folder: Path) -> None:
    """Write config.json and the index of weights that are no longer quantised."""
    config = {key: value for key, value in model.config.items() if key != quantization.KEY}
    (folder / config_json.NAME).write_text(json.dumps(config, indent=2) + "\n")
    if (folder / weights.INDEX).exists():
        size = sum(prod(one.shape) * safetensors_header.BITS[one.dtype] // 8 for one in model.weights.values())
        places = {name: model.tensors[model.parts(name)[0]].file for name in model.weights}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / weights.INDEX).write_text(json.dumps(index, indent=2) + "\n")
