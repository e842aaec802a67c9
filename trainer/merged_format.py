"""Write the released checkpoint anew with what training changed: the same files, names, types, shapes and order.

Each file keeps its header, byte by byte, so every tensor lies where it lay. One weight at a time is in memory. Once a
file is written it is read back: what was not trained must have the released checksum, a merged weight must be what the
adapter's factors give when multiplied once more, and nothing may be infinite or not a number.

Configuration, tokenizer and chat template are copied, the model card is not: it describes another model.
"""

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer import merge, released
from trainer.faults import Fault
from trainer.merge import Adapter, NewValue
from trainer.released import Entry, Model, enumerate_names
from trainer.torch_dist import Stored

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"}
READABLE = 0o644  # safetensors makes files that only their owner can read


@dataclass(frozen=True)
class Trained:
    """Where the tensors of the exported model come from; those in neither dictionary from the release."""

    model: Model
    sums: dict[str, str]  # the released checksums, as the conversion recorded them
    stored: Stored
    config: object  # Megatron's
    adapters: dict[str, Adapter] = field(default_factory=dict)
    values: dict[str, NewValue] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # copy -> original, of tensors that Megatron has once

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor as it has to be written; None for one that is copied from the release."""
        name = self.copies.get(name, name)
        entry = self.model.tensors[name]
        if name in self.values:
            return self.values[name].value(self.stored, self.config, entry)
        if name in self.adapters:
            adapter = self.adapters[name]
            factors = adapter.factors(self.stored, self.config)
            magnitude = adapter.magnitudes(self.stored, self.config)
            return merge.merged(load(self.model.folder, entry), *factors, adapter.scale, magnitude)
        return None


def write_file(trained: Trained, file: str, folder: Path) -> None:
    entries = sorted(
        ((entry.start, name, entry) for name, entry in trained.model.tensors.items() if entry.file == file)
    )
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    with (trained.model.folder / file).open("rb") as old, target.open("wb") as new:
        new.write(old.read(entries[0][0]))  # the header
        for start, name, entry in entries:
            assert new.tell() == start, f"{file}: {name} does not follow the tensor before it"
            tensor = trained.tensor(name)
            if tensor is None:
                released.copy(old, new, entry)
            else:
                assert tensor.shape == entry.shape, f"{name}: {tensor.shape} is not the released {entry.shape}"
                new.write(as_bytes(tensor))
    target.chmod(READABLE)
    _check_file(trained, target, entries)


def copy_other_files(model: Model, folder: Path) -> str | None:
    """Configuration, tokenizer, chat template. Returns the SHA-256 of the chat template, if there is one."""
    for path in sorted(model.folder.iterdir()):
        if path.is_file() and path.suffix not in NOT_COPIED and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
            (folder / path.name).chmod(READABLE)
    template = folder / "chat_template.jinja"
    return hashlib.sha256(template.read_bytes()).hexdigest() if template.exists() else None


def load(folder: Path, entry: Entry) -> torch.Tensor:
    with (folder / entry.file).open("rb") as f:
        f.seek(entry.start)
        found = bytearray(f.read(entry.size))
    return torch.frombuffer(found, dtype=merge.DTYPES[entry.dtype]).view(entry.shape)


def as_bytes(tensor: torch.Tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _check_file(trained: Trained, target: Path, entries: list) -> None:
    wrong = [name for _, name, entry in entries if not _is_right(trained, target, name, entry)]
    if wrong:
        raise Fault(f"{target}: read back, {len(wrong)} tensors are wrong: {enumerate_names(wrong)}")


def _is_right(trained: Trained, target: Path, name: str, entry: Entry) -> bool:
    source = trained.copies.get(name, name)
    if source in trained.values:
        return bool(load(target.parent, entry).isfinite().all())
    if source not in trained.adapters:
        return released.checksum(target, entry) == trained.sums[name]
    adapter, before = trained.adapters[source], trained.model.tensors[source]
    if released.checksum(trained.model.folder / before.file, before) != trained.sums[source]:
        return False  # the release is not the one that was trained
    factors = adapter.factors(trained.stored, trained.config)
    magnitude = adapter.magnitudes(trained.stored, trained.config)
    found = load(target.parent, entry)
    return merge.is_merged(found, load(trained.model.folder, before), *factors, adapter.scale, magnitude)
