"""Writer of a packed base for vLLM: export.quantization=packed.

The codes and scales are those of the packed base (convert.to: packed), in the release's rows and names. int4 becomes
compressed-tensors' pack-quantized, fp8 the FP8 of DeepSeek-V3. All other tensors are the release's, and unpacked if the
release is quantised. config.json describes the format, and lists all matrices that are not packed.
"""

# pyright: reportArgumentType=false

import json
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from conf.model_files import config_json, quantization, weights
from conf.rules.packed_base import FORMATS
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from trainer.weights import new_safetensors, released
from trainer.weights.exported.parts import Layout, Merged
from trainer.weights.packed_base import as_trained, files
from trainer.weights.packed_base.as_trained import AsTrained
from trainer.weights.trained import Trained

EXPERTS = re.compile(r"(.*\.experts)\.\d+\..*")


@dataclass
class Codes(Merged):
    """Codes and scales of the packed weights; `last` has those of the weight that a thread wrote last."""

    last: threading.local = field(default_factory=threading.local)

    @property
    def packed(self) -> AsTrained:
        assert self.trained.packed
        return self.trained.packed

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        weight = self.weight(name)
        if not self.packed.has(weight):
            return super().blocks(name)
        if getattr(self.last, "weight", None) != weight:
            self.last.weight, self.last.tensors = weight, self._tensors(weight)
        return [self.last.tensors[name]]

    def is_right(self, path: Path, name: str, entry: released.Entry, written: str) -> bool:
        if self.packed.has(self.weight(name)):
            return released.has_sum(path, entry, written)
        return super().is_right(path, name, entry, written)

    def weight(self, name: str) -> str:
        stem, _, end = name.rpartition(".")
        codes = f"{stem}.weight"
        return codes if end.startswith("weight") and self.packed.has(codes) else super().weight(name)

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        return {}

    def layouts(self) -> list[Layout]:
        """Return the release's files with codes and scales in place of packed weights."""
        model, shapes = self.trained.model, dict[str, dict[str, tuple[str, tuple[int, ...]]]]()
        for name, one in model.weights.items():
            of_file = shapes.setdefault(model.tensors[model.parts(name)[0]].file, {})
            of_file |= self._shapes(name, one.shape) if self.packed.has(name) else {name: (one.dtype, one.shape)}
        headers = {file: new_safetensors.header(file, of_file) for file, of_file in sorted(shapes.items())}
        return [Layout(file, rows, header) for file, (header, rows) in headers.items()]

    def describe(self, folder: Path) -> None:
        """Write config.json, and the index if the release has one."""
        form, skipped = self.packed.form, self._unpacked()
        section: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        section |= {"weight_block_size": form.block, "modules_to_not_convert": skipped}
        if form.kind == "int":
            numbers = {"num_bits": form.bits, "type": "int", "symmetric": True, "strategy": "group"}
            group = {"targets": ["Linear"], "weights": numbers | {"group_size": form.block[1]}}
            section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": skipped}
            section |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
        config = json_object.read(folder / config_json.NAME)
        (config.get("text_config") or {}).pop(quantization.KEY, None)
        content = json.dumps(config | {quantization.KEY: section}, indent=2)
        (folder / config_json.NAME).write_text(content + "\n")
        if (folder / weights.INDEX).exists():
            layouts = self.layouts()
            places = {name: layout.file for layout in layouts for name in layout.rows}
            new_safetensors.write_index(folder, sum(layout.size for layout in layouts), places)

    def _shapes(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        (rows, columns), (height, width) = shape, self.packed.form.block
        blocks = (-(-rows // height), -(-columns // width))
        if self.packed.form.kind == "fp8":
            return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("F32", blocks)}
        packed = {f"{name}_packed": ("I32", (rows, columns // 8)), f"{name}_scale": ("BF16", blocks)}
        return packed | {f"{name}_shape": ("I64", (2,))}

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        ((_, part),) = self.packed.parts[name].values()
        megatron, (codes, scales) = self.packed.parts[name][None][0], self.packed.codes(part)
        self.trained.stored.seen.add(megatron)
        if self.packed.form.kind == "fp8":
            return {name: codes, f"{name}_scale_inv": scales}
        shape = torch.tensor(self.trained.model.weights[name].shape)
        words = codes.contiguous().view(torch.int32)
        return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": shape}

    def _unpacked(self) -> list[str]:
        """Return the modules of matrices that are not packed, as both formats list them. Experts are one pattern."""
        found = {"lm_head"}
        for name, one in self.trained.model.weights.items():
            if name.endswith(".weight") and len(one.shape) == 2 and not self.packed.has(name):
                experts = EXPERTS.fullmatch(name)
                found.add(f"re:{re.escape(experts[1])}.*" if experts else name.removesuffix(".weight"))
        return sorted(found)


def open_codes(run: Run, trained: Trained) -> Codes:
    """Return the contents of a packed base's files."""
    source = files.open_packed(Path(run.paths.base), FORMATS[run.model.base])
    names = [name for name, row in source.index.items() if "height" in row]
    packed = as_trained.of_source(run, source, trained.model, trained.registry, trained.config, names)
    plain = {name for parts in packed.parts.values() for name, part in parts.values() if not part.turned}
    stacks = {parts[at][0] for parts in packed.parts.values() for at in parts if at is not None}
    if odd := sorted({*names} - (plain - stacks)):
        text = f"the release stores these in other shapes: {released.enumerate_names(odd)}"
        raise Fault(f"export.quantization: packed, but {text}; null")
    return Codes(replace(trained, packed=packed))
