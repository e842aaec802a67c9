"""Trained tensors, matched with the released model: the source of each tensor of an export."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from conf.rules import packed_base
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron.model import open_bridge
from trainer.weights import mapping, merge, released, released_tensors, torch_dist
from trainer.weights.conversion import unwritten
from trainer.weights.low_rank import Change
from trainer.weights.mapped.read_rows import ReadRows
from trainer.weights.packed_base import as_trained

CONVERT = "python -m trainer.convert"


@dataclass(frozen=True)
class Trained:
    """Sources of the exported model's tensors. Those in neither dictionary come from the release."""

    model: released.Model
    digest: str  # of the release that the base was made from
    sums: dict[str, str]  # the released checksums, recorded by the conversion
    stored: torch_dist.Stored
    config: Any  # Megatron's
    adapters: dict[str, tuple[merge.Adapter, ...]] = field(default_factory=dict)  # several for a stack of experts
    values: dict[str, tuple[merge.NewValue, ...]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # copy -> original, for tensors that Megatron has once
    registry: Any = None  # Bridge's
    packed: as_trained.AsTrained | None = None  # for a merge onto the values of a packed base
    last: threading.local = field(default_factory=threading.local)  # the change that a thread read last

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return the tensor to write; None if it is copied from the release."""
        name = self.copies.get(name, name)
        if name in self.values:
            return self._assembled(name, ((value.part, self._value(value)) for value in self.values[name]))
        if name in self.adapters:
            return self._assembled(name, ((adapter.part, self._merged(adapter)) for adapter in self.adapters[name]))
        if self.packed and self.packed.has(name):
            parts = self.packed.parts[name].values()
            return self._assembled(name, ((part, self._unpacked(self.packed, part)) for _, part in parts))
        return None

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        """Return the tensor to write, in blocks of rows in order; each is invalid after the next is requested."""
        source = self.copies.get(name, name)
        if source in self.values and self.values[source][0].part.expert is None:
            return self.values[source][0].blocks(self.stored, self.config, self.model.weights[source])
        if source in self.adapters and (weight := self.rows(self.adapters[source][0].part)):
            return self.change(self.adapters[source][0]).blocks(weight)
        return None if (whole := self.tensor(name)) is None else [whole]

    def before(self, part: mapping.Part) -> torch.Tensor:
        """Return the weight to merge an adapter onto, in the release's orientation, or one expert of a stack."""
        unpacked = self.packed.read(part) if self.packed else None
        return mapping.read(self.model, part) if unpacked is None else unpacked

    def rows(self, part: mapping.Part) -> ReadRows | None:
        """Return a reader of the released weight's rows, if it is stored in Megatron's orientation."""
        is_packed = self.packed and self.packed.has(part.name)
        if is_packed or part.turned or part.expert is not None or part.name in self.model.packed:
            return None
        entry = self.model.tensors[part.name]
        path, dtype = self.model.folder / entry.file, released_tensors.DTYPES[entry.dtype]
        return ReadRows(path, entry, dtype, "released", self.sums[part.name])

    def change(self, adapter: merge.Adapter) -> Change:
        """Return the change of a weight by this adapter. The last one is cached for the check after the merge."""
        if getattr(self.last, "adapter", None) is not adapter:
            self.last.adapter, self.last.change = adapter, adapter.change(self.stored, self.config)
        return self.last.change

    def _assembled(self, name: str, parts: Iterable[tuple[mapping.Part, torch.Tensor]]) -> torch.Tensor:
        """Return a weight from its parts: all of it, or one expert after another."""
        entry = self.model.weights[name]
        result = torch.empty(entry.shape, dtype=released_tensors.DTYPES[entry.dtype])
        for part, tensor in parts:
            if part.expert is None:
                return tensor
            result[part.expert] = tensor
        return result

    def _value(self, value: merge.NewValue) -> torch.Tensor:
        return value.value(self.stored, self.config, self.model.weights[value.part.name])

    def _merged(self, adapter: merge.Adapter) -> torch.Tensor:
        before = self.before(adapter.part)
        if self.packed is None or not self.packed.has(adapter.part.name):
            return adapter.merged(before, self.change(adapter))
        exact = adapter.merged(before.float(), self.change(adapter))
        rounded = exact.to(released_tensors.DTYPES[self.model.weights[adapter.part.name].dtype])
        self.packed.measure(adapter.part, before, exact, rounded)
        return rounded

    def _unpacked(self, packed: as_trained.AsTrained, part: mapping.Part) -> torch.Tensor:
        """Return a weight that was packed in training and had no adapter."""
        before = self.before(part)
        rounded = before.to(released_tensors.DTYPES[self.model.weights[part.name].dtype])
        packed.measure(part, before, before.float(), rounded)
        return rounded

    def exact(self, name: str) -> torch.Tensor:
        """Return the weight in fp32; a merged one is not rounded to the release's type first."""
        name = self.copies.get(name, name)
        if name in self.values:
            return self._value(self.values[name][0]).float()
        before = released_tensors.read(self.model, name).float()
        if name not in self.adapters:
            return before
        (adapter,) = self.adapters[name]  # stacks are never rounded to a format of codes
        return adapter.merged(before, self.change(adapter))

    def has(self, name: str) -> bool:
        """Whether training, or the converted base, has the weight."""
        name = self.copies.get(name, name)
        return name in self.values or name in self.adapters

    def is_released(self, name: str) -> bool:
        """Whether the release still has the weight from which the base was made."""
        entries = {part: self.model.tensors[part] for part in self.model.parts(name)}
        return all(released.has_sum(self.model.folder / e.file, e, self.sums[part]) for part, e in entries.items())

    def is_merged(self, name: str, found: torch.Tensor) -> bool:
        """Whether `found` is the released weight `name` merged with its adapter."""
        return all(self._is_merged(adapter, adapter.part.of(found)) for adapter in self.adapters[name])

    def _is_merged(self, adapter: merge.Adapter, found: torch.Tensor) -> bool:
        before = adapter.part.turn(self.before(adapter.part))
        return self.change(adapter).is_in(adapter.part.turn(found), before)

    def is_merged_in(self, name: str, path: Path, entry: released.Entry, written: str) -> bool:
        """Whether the file has the written bytes, and they are the released weight `name` merged with its adapter.

        Bytes of the file and of the release are read once, both for the comparison and for their checksums.
        """
        adapter = self.adapters[name][0]
        before = self.rows(adapter.part)
        if before is None:
            if not released.has_sum(path, entry, written) or not self.is_released(name):
                return False
            return self.is_merged(name, released_tensors.at(path.parent, replace(entry, file=path.name)))
        from_file = ReadRows(path, entry, released_tensors.DTYPES[entry.dtype], "found")
        try:
            is_right = self.change(adapter).is_in(from_file, before)
        except Fault:  # one of the files ends early: exported/parts.py reports which
            return False
        return is_right and from_file.has_sum(written) and before.is_recorded


def find(run: Run, folder: Path) -> Trained:
    """Match the tensors to export with the released model."""
    trained = match(run, folder)
    if "adapter" in (run.export.formats or ()) and not trained.adapters:
        raise Fault(f"export.formats: adapter, but {folder} holds none")
    if packed_base.merges_onto(run):
        numbers = as_trained.open_as_trained(run, trained.model, trained.registry, trained.config)
        return replace(trained, packed=numbers)
    return trained


def match(run: Run, folder: Path) -> Trained:
    """Match a checkpoint with the released model; every tensor of both sides must have its counterpart."""
    bridge = open_bridge(run)
    registry, config = bridge._model_bridge.mapping_registry(), bridge.to_megatron_provider(load_weights=False)
    model, stored = released.read(Path(run.paths.model)), unwritten.open_base(run, folder)
    base = Path(run.paths.base)
    base_mark = checkpoints.require(base, "paths.base", CONVERT)
    sums = released.recorded_sums(base)
    if sums.keys() != model.tensors.keys():
        raise Fault(f"{base}: was not made from {model.folder}, whose tensors have other names")
    copies = released.repeated(model)
    trained = Trained(model, base_mark["digest"], sums, stored, config, registry=registry, copies=copies)
    torch_dist.require_all(stored)
    if any(".adapter." in name for name in stored.places | stored.digests):
        trained.adapters.update(merge.find_adapters(stored, registry, model, config.num_moe_experts or 0))
    else:
        computed = {name for name in model.weights if released.COMPUTED.search(name)}
        elsewhere = {*copies, *computed, *base_mark["left_out"]}
        trained.values.update(merge.find_values(stored, registry, model, elsewhere))
    return trained
