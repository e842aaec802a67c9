"""Writer of a packed base for vLLM: export.quantization=packed.

The codes and scales are those of the packed base (convert.to: packed), in the release's rows and names, in the formats
of file_format.py. All other tensors are the release's, and unpacked if the release is quantised. config.json
describes the format, and lists all matrices that are not packed.
"""

# pyright: reportArgumentType=false

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from conf.model_files import config_json, quantization, weights
from conf.rules.packed_base import FORMATS, Format
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from trainer.weights import new_safetensors, released, released_tensors
from trainer.weights.exported import file_format
from trainer.weights.exported.parts import Layout, Merged
from trainer.weights.packed_base import as_trained, files
from trainer.weights.packed_base.as_trained import AsTrained
from trainer.weights.packed_base.part import Found
from trainer.weights.trained import Trained


@dataclass
class Codes(Merged):
    """Codes and scales of the packed weights; `last` has those of the weight that a thread wrote last."""

    last: threading.local = field(default_factory=threading.local)

    @property
    def packed(self) -> AsTrained:
        assert self.trained.packed
        return self.trained.packed

    @property
    def form(self) -> Format:
        return self.packed.form

    def has(self, weight: str) -> bool:
        """Whether the weight is written as codes. Others that training packs are written with their numbers there."""
        return self.packed.has(weight) and not file_format.IN_BF16.fullmatch(weight)

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        weight = self.weight(name)
        if self.has(weight):
            return [self.tensors(weight)[name]]
        packed = self.trained.packed
        if packed is None or not packed.has(weight):
            return super().blocks(name)
        ((_, part),) = packed.parts[weight].values()
        numbers = packed.read(part)
        assert numbers is not None
        return [numbers.to(released_tensors.DTYPES[self.trained.model.weights[weight].dtype])]

    def is_right(self, path: Path, name: str, entry: released.Entry, written: str) -> bool:
        if self.has(self.weight(name)):
            return released.has_sum(path, entry, written)
        return super().is_right(path, name, entry, written)

    def weight(self, name: str) -> str:
        stem, _, end = name.rpartition(".")
        codes = f"{stem}.weight"
        return codes if end.startswith("weight") and self.has(codes) else super().weight(name)

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def layouts(self) -> list[Layout]:
        """Return the release's files with codes and scales in place of packed weights."""
        model, shapes = self.trained.model, dict[str, dict[str, tuple[str, tuple[int, ...]]]]()
        for name, one in model.weights.items():
            of_file = shapes.setdefault(model.tensors[model.parts(name)[0]].file, {})
            plain = {name: (one.dtype, one.shape)}
            of_file |= file_format.entries(self.form, name, one.shape) if self.has(name) else plain
        headers = {file: new_safetensors.header(file, of_file) for file, of_file in sorted(shapes.items())}
        return [Layout(file, rows, header) for file, (header, rows) in headers.items()]

    def describe(self, folder: Path) -> None:
        """Write config.json, and the index if the release has one."""
        config = json_object.read(folder / config_json.NAME)
        (config.get("text_config") or {}).pop(quantization.KEY, None)
        section = file_format.section(self.form, self._unpacked())
        content = json.dumps(config | {quantization.KEY: section}, indent=2)
        (folder / config_json.NAME).write_text(content + "\n")
        if (folder / weights.INDEX).exists():
            layouts = self.layouts()
            places = {name: layout.file for layout in layouts for name in layout.rows}
            new_safetensors.write_index(folder, sum(layout.size for layout in layouts), places)

    def codes(self, name: str) -> Found:
        """Return codes, scales and factor of a packed weight."""
        megatron, part = self.packed.parts[name][None]
        self.trained.stored.seen.add(megatron)
        return self.packed.codes(part)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a packed weight. A thread that asks for the same weight again gets the same ones."""
        if getattr(self.last, "weight", None) != name:
            shape = self.trained.model.weights[name].shape
            self.last.weight, self.last.tensors = name, file_format.tensors(self.form, name, shape, self.codes(name))
        return self.last.tensors

    def _unpacked(self) -> set[str]:
        """Return the modules of matrices that are not written as codes."""
        weights = self.trained.model.weights.items()
        matrices = {name for name, one in weights if name.endswith(".weight") and len(one.shape) == 2}
        return {"lm_head", *(name.removesuffix(".weight") for name in matrices if not self.has(name))}


def open_codes(run: Run, trained: Trained) -> Codes:
    """Return the contents of a packed base's files."""
    source = files.open_packed(Path(run.paths.base), FORMATS[run.model.base])
    names = [name for name, row in source.index.items() if "height" in row]
    packed = as_trained.of_source(run, source, trained.model, trained.registry, trained.config, names)
    plain = {name for parts in packed.parts.values() for name, part in parts.values() if not part.turned}
    stacks = {parts[at][0] for parts in packed.parts.values() for at in parts if at is not None}
    stored = {weight: packed.sections[weight] for weight in plain - stacks}
    if odd := sorted({*names}.difference(*stored.values())):
        text = f"the release stores these in other shapes: {released.enumerate_names(odd)}"
        raise Fault(f"export.quantization: packed, but {text}; null")
    if apart := sorted(weight for weight, parts in stored.items() if len(_factors(source, parts)) > 1):
        text = f"these have several factors, and vLLM takes one: {released.enumerate_names(apart)}"
        raise Fault(f"export.quantization: packed, but {text}; model.base=int4, fp8 or mxfp4")
    return Codes(replace(trained, packed=packed))


def _factors(source: files.Packed, parts: list[str]) -> set[float]:
    """Return the factors of a weight's matrices; empty if the format has none."""
    return {factor for part in parts if source.form.factor_bytes for factor in source.factors(part).flatten().tolist()}
