"""Writer of the merged model: the released checkpoint with the trained weights, in the same files, names and types.

Each file keeps its header, byte by byte, so every tensor keeps its shape and lies where it lay. One weight at a time is
in memory. Once a file is written it is read back: a weight that was not trained must have the released checksum, a
merged weight must be what the adapter's factors give when multiplied once more, a new value must be the one written,
and nothing may be infinite or not a number.

Configuration, tokenizer and chat template are copied, the model card is not: it describes another model.
"""

# pyright: reportArgumentType=false

import hashlib
import shutil
from pathlib import Path

import torch

from contract.faults import Fault
from trainer.weights import merge, released, released_tensors
from trainer.weights.released import Entry, Model, enumerate_names
from trainer.weights.trained import Trained

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"}
READABLE = 0o644  # safetensors makes files that only their owner can read


def write_file(trained: Trained, file: str, folder: Path) -> None:
    entries = sorted(
        ((entry.start, name, entry) for name, entry in trained.model.tensors.items() if entry.file == file)
    )
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    with (trained.model.folder / file).open("rb") as old, target.open("wb") as new:
        new.write(old.read(entries[0][0]))  # the header
        for start, name, entry in entries:
            assert new.tell() == start, f"{file}: {name} does not follow the tensor before it"
            tensor = trained.tensor(name)
            if tensor is None:
                released.copy(old, new, entry)
            else:
                assert tensor.shape == entry.shape, f"{name}: {tensor.shape} is not the released {entry.shape}"
                if trained.copies.get(name, name) in trained.values:
                    written[name] = (
                        hashlib.sha256(as_bytes(tensor)).hexdigest() if tensor.isfinite().all() else "not finite"
                    )
                new.write(as_bytes(tensor))
    target.chmod(READABLE)
    _check_file(trained, target, entries, written)


def copy_other_files(model: Model, folder: Path) -> str | None:
    """Copy configuration, tokenizer and chat template. Returns the SHA-256 of the chat template, if there is one."""
    for path in sorted(model.folder.iterdir()):
        if path.is_file() and path.suffix not in NOT_COPIED and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
            (folder / path.name).chmod(READABLE)
    template = folder / "chat_template.jinja"
    return hashlib.sha256(template.read_bytes()).hexdigest() if template.exists() else None


def as_bytes(tensor: torch.Tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _check_file(trained: Trained, target: Path, entries: list, written: dict[str, str]) -> None:
    wrong = [name for _, name, entry in entries if not _is_right(trained, target, name, entry, written)]
    edited = [name for name in wrong if not _is_released(trained, trained.copies.get(name, name))]
    if edited:
        raise Fault(
            f"{trained.model.folder}: {len(edited)} tensors are not those that the base was converted from: "
            f"{enumerate_names(edited)}; put the released files back, or convert and train again"
        )
    if wrong:
        raise Fault(f"{target}: read back, {len(wrong)} tensors are wrong: {enumerate_names(wrong)}")


def _is_right(trained: Trained, target: Path, name: str, entry: Entry, written: dict[str, str]) -> bool:
    source = trained.copies.get(name, name)
    if source in trained.values:
        return released.checksum(target, entry) == written[name]
    if source not in trained.adapters:
        return released.checksum(target, entry) == trained.sums[name]
    if not _is_released(trained, source):
        return False
    adapter = trained.adapters[source]
    factors = adapter.factors(trained.stored, trained.config)
    magnitude = adapter.magnitudes(trained.stored, trained.config)
    found = released_tensors.at(target.parent, entry)
    return merge.is_merged(found, released_tensors.read(trained.model, source), *factors, adapter.scale, magnitude)


def _is_released(trained: Trained, name: str) -> bool:
    """Whether the release still holds the tensor that the base was made from."""
    entry = trained.model.tensors[name]
    return released.checksum(trained.model.folder / entry.file, entry) == trained.sums[name]
