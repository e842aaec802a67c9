"""Writer of the merged model: the released checkpoint with the trained weights, in the same files, names and types.

Each file keeps its header, byte by byte, so every tensor keeps its shape and lies where it lay. Small weights are
merged side by side, a large one by itself, so that little is in memory. Once a file is written it is read back: a
weight that was not trained must have the released checksum, a merged weight must be what the adapter's factors give
when multiplied once more, a new value must be the one written, and nothing may be infinite or not a number.

Weights of a quantised release are unpacked: a file then has a header of its own, with the same weights in the same
order and no scales. Configuration, tokenizer and chat template are copied, and config.json without quantization_config;
the model card is not: it describes another model.
"""

# pyright: reportArgumentType=false

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch

from conf.model_files import config_json, quantization, safetensors_header, weights
from contract.faults import Fault
from trainer.startup import device
from trainer.weights import merge, released, released_tensors
from trainer.weights.released import Entry, Model, enumerate_names
from trainer.weights.trained import Trained

NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".md"}
READABLE = 0o644  # safetensors makes files that only their owner can read
AT_ONCE = 64 * 2**20  # bytes of weights that are merged side by side
THREADS = 8  # at most


def files(model: Model) -> list[str]:
    """Files that the merged model has. Those that hold nothing but scales are none of them."""
    return sorted({model.tensors[model.parts(name)[0]].file for name in model.weights})


def write_file(trained: Trained, file: str, folder: Path) -> None:
    header, entries = layout(trained.model, file)
    target = folder / file
    target.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    with (
        (trained.model.folder / file).open("rb") as old,
        target.open("wb") as new,
        ThreadPoolExecutor(min(THREADS, device.cores())) as pool,
    ):
        new.write(header)
        for batch in _batches(entries):
            for name, tensor in zip(batch, pool.map(lambda name: _changed(trained, name), batch), strict=True):
                entry = entries[name]
                assert new.tell() == entry.start, f"{file}: {name} does not follow the tensor before it"
                if tensor is None:
                    released.copy(old, new, trained.model.tensors[name])
                    continue
                assert tensor.shape == entry.shape, f"{name}: {tensor.shape} is not the released {entry.shape}"
                if trained.copies.get(name, name) not in trained.adapters:
                    written[name] = (
                        hashlib.sha256(as_bytes(tensor)).hexdigest() if tensor.isfinite().all() else "not finite"
                    )
                new.write(as_bytes(tensor))
    target.chmod(READABLE)
    _check_file(trained, target, entries, written)


def copy_other_files(model: Model, folder: Path, as_released: bool = False) -> str | None:
    """Copy configuration, tokenizer and chat template. Returns the SHA-256 of the chat template, if there is one."""
    for path in other_files(model):
        shutil.copyfile(path, folder / path.name)
        (folder / path.name).chmod(READABLE)
    if model.packed and not as_released:
        _describe_unpacked(model, folder)
    template = folder / "chat_template.jinja"
    return hashlib.sha256(template.read_bytes()).hexdigest() if template.exists() else None


def other_files(model: Model) -> list[Path]:
    """The release's configuration, tokenizer and chat template."""
    there = [path for path in sorted(model.folder.iterdir()) if path.is_file() and path.suffix not in NOT_COPIED]
    return [path for path in there if not path.name.startswith(".")]


def as_bytes(tensor: torch.Tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def in_order(model: Model, file: str) -> dict[str, Entry]:
    """Tensors of a released file, in the order of their bytes."""
    there = [(name, entry) for name, entry in model.tensors.items() if entry.file == file]
    return dict(sorted(there, key=lambda item: item[1].start))


def layout(model: Model, file: str) -> tuple[bytes, dict[str, Entry]]:
    """Header of a file of the merged model, and the places of its tensors in order."""
    old = in_order(model, file)
    if not model.packed:
        with (model.folder / file).open("rb") as f:
            return f.read(next(iter(old.values())).start), old
    of_codes = {one.codes: name for name, one in model.packed.items()}
    names = [of_codes.get(name, name) for name in old]
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
    return whole, {
        name: Entry(*shapes[name], file, len(whole) + begin, end - begin) for name, (begin, end) in places.items()
    }


def _describe_unpacked(model: Model, folder: Path) -> None:
    """Write config.json and the index of weights that are no longer quantised."""
    config = {key: value for key, value in model.config.items() if key != quantization.KEY}
    (folder / config_json.NAME).write_text(json.dumps(config, indent=2) + "\n")
    if (folder / weights.INDEX).exists():
        size = sum(prod(one.shape) * safetensors_header.BITS[one.dtype] // 8 for one in model.weights.values())
        places = {name: model.tensors[model.parts(name)[0]].file for name in model.weights}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / weights.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _batches(entries: dict[str, Entry]) -> Iterator[list[str]]:
    """Cut a file's weights into groups that fit into memory together, however large one of them is."""
    batch, size = [], 0
    for name, entry in entries.items():
        if batch and size + entry.size > AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += entry.size
    yield batch


def _changed(trained: Trained, name: str) -> torch.Tensor | None:
    """The weight as it has to be written; None for one that is copied from the release, byte by byte."""
    tensor = trained.tensor(name)
    return released_tensors.read(trained.model, name) if tensor is None and name in trained.model.packed else tensor


def _check_file(trained: Trained, target: Path, entries: dict[str, Entry], written: dict[str, str]) -> None:
    wrong = []
    with ThreadPoolExecutor(min(THREADS, device.cores())) as pool:
        for batch in _batches(entries):
            right = pool.map(lambda name: _is_right(trained, target, name, entries[name], written), batch)
            wrong += [name for name, fine in zip(batch, right, strict=True) if not fine]
    edited = [name for name in wrong if not is_released(trained, trained.copies.get(name, name))]
    if edited:
        raise changed(trained, edited)
    if wrong:
        raise Fault(f"{target}: read back, {len(wrong)} tensors are wrong: {enumerate_names(wrong)}")


def changed(trained: Trained, names: list[str]) -> Fault:
    return Fault(
        f"{trained.model.folder}: {len(names)} tensors are not those that the base was converted from: "
        f"{enumerate_names(names)}; put the released files back, or convert and train again"
    )


def _is_right(trained: Trained, target: Path, name: str, entry: Entry, written: dict[str, str]) -> bool:
    source = trained.copies.get(name, name)
    if source in trained.values:
        return released.checksum(target, entry) == written[name]
    if source not in trained.adapters:
        if name in written:  # unpacked
            return released.checksum(target, entry) == written[name] and is_released(trained, name)
        return released.checksum(target, entry) == trained.sums[name]
    return is_released(trained, source) and is_merged(trained, source, released_tensors.at(target.parent, entry))


def is_merged(trained: Trained, name: str, found: torch.Tensor) -> bool:
    """Whether this is the released weight of that name, merged with its adapter."""
    adapter = trained.adapters[name]
    factors = adapter.factors(trained.stored, trained.config)
    magnitude = adapter.magnitudes(trained.stored, trained.config)
    before = adapter.part.turn(released_tensors.read(trained.model, name))
    return merge.is_merged(adapter.part.turn(found), before, *factors, adapter.scale, magnitude)


def is_released(trained: Trained, name: str) -> bool:
    """Whether the release still holds the weight that the base was made from."""
    parts = {part: trained.model.tensors[part] for part in trained.model.parts(name)}
    return all(
        released.checksum(trained.model.folder / entry.file, entry) == trained.sums[part]
        for part, entry in parts.items()
    )
