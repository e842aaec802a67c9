"""Tensors of a released checkpoint: names, types, shapes, places and checksums, read without a tensor library.

The checksum of a tensor is that of its bytes, wherever they lie, so the digest of a model does not depend on how it is
cut into files. trainer/checks/inputs.py has checked beforehand that the files are there and as long as their headers
say.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from conf.model_files import config_json, weights
from conf.model_files.weights import Entry
from contract.faults import Fault

SOURCE = "source.json"  # beside a converted model: what each released tensor was
BLOCK = 2**20  # bytes read at once
AT_ONCE = 2**15  # numbers looked at together
# Bits of the exponent, and the unsigned integer that holds them.
EXPONENTS: dict[str, tuple[str, np.unsignedinteger]] = {
    "F64": ("<u8", np.uint64(0x7FF0000000000000)),
    "F32": ("<u4", np.uint32(0x7F800000)),
    "F16": ("<u2", np.uint16(0x7C00)),
    "BF16": ("<u2", np.uint16(0x7F80)),
}
# Left over in old Llama checkpoints; every model class computes it.
COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Model:
    folder: Path
    config: dict
    tensors: dict[str, Entry]

    def files(self) -> list[str]:
        return sorted({entry.file for entry in self.tensors.values()})

    def stamps(self) -> dict[str, list[int]]:
        """Size and time of each file: while they stay, so do the checksums."""
        stats = {file: (self.folder / file).stat() for file in self.files()}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def read(folder: Path) -> Model:
    return Model(folder, config_json.read(folder / config_json.NAME), weights.tensors(folder))


def repeated(model: Model) -> dict[str, str]:
    """Tensors that are copies of others by the architecture, with what they copy.

    Megatron has one embedding and one output layer. The releases of GLM-4.5+ and DeepSeek-V3 write them once more for
    each multi-token-prediction layer; one with tied embeddings may write its output layer.
    """
    tied = model.config.get("tie_word_embeddings", False)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    copies = {"lm_head.weight": head} if tied else {}
    for layer in mtp_layers(model):
        prefix = f"model.layers.{layer}."
        copies |= {
            prefix + "embed_tokens.weight": "model.embed_tokens.weight",
            prefix + "shared_head.head.weight": head,
        }
    return {copy: original for copy, original in copies.items() if copy in model.tensors}


def mtp_layers(model: Model) -> range:
    layers = model.config["num_hidden_layers"]
    return range(layers, layers + (model.config.get("num_nextn_predict_layers") or 0))


def of_mtp(model: Model) -> set[str]:
    prefixes = tuple(f"model.layers.{layer}." for layer in mtp_layers(model))
    return {name for name in model.tensors if prefixes and name.startswith(prefixes)}


def checksums(model: Model, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """SHA-256 of each of these tensors, and the names of those in which not every number is finite.

    They are read once, from several threads.
    """
    entries = {name: model.tensors[name] for name in names}
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda entry: _read(model.folder / entry.file, entry), entries.values()))
    sums = {name: checksum for name, (checksum, _) in zip(entries, found, strict=True)}
    return sums, [name for name, (_, finite) in zip(entries, found, strict=True) if not finite]


def not_finite(model: Model, names: list[str]) -> Fault:
    text = f"{len(names)} tensors hold numbers that are infinite or not a number"
    return Fault(f"{model.folder}: {text}: {enumerate_names(sorted(names))}; download it again")


def checksum(path: Path, entry: Entry) -> str:
    return _read(path, entry)[0]


def copy(old: BinaryIO, new: BinaryIO, entry: Entry) -> None:
    for block in _blocks(old, entry):
        new.write(block)


def digest(model: Model, sums: dict[str, str]) -> str:
    lines = [[name, entry.dtype, entry.shape, sums[name]] for name, entry in sorted(model.tensors.items())]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def enumerate_names(names: Iterable[str], limit: int = 10) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read(path: Path, entry: Entry) -> tuple[str, bool]:
    """Checksum of a tensor, and whether all its numbers are finite."""
    found, finite = hashlib.sha256(), True
    with path.open("rb") as f:
        for block in _blocks(f, entry):
            found.update(block)
            finite = finite and _is_finite(block, entry.dtype)
    return found.hexdigest(), finite


def _is_finite(block: bytes, dtype: str) -> bool:
    """Whether all numbers are finite.

    Numbers whose exponent has all bits set are infinite or not a number. Integers and FP8 always count as finite.
    """
    if dtype not in EXPONENTS:
        return True
    width, exponent = EXPONENTS[dtype]
    numbers = np.frombuffer(block, width)
    if not numbers.size:
        return True
    parts = np.empty(min(numbers.size, AT_ONCE), numbers.dtype)  # small enough for the processor's own memory
    for start in range(0, numbers.size, AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        if np.bitwise_and(some, exponent, out=parts[: some.size]).max() == exponent:
            return False
    return True


def _blocks(f: BinaryIO, entry: Entry) -> Iterator[bytes]:
    f.seek(entry.start)
    left = entry.size
    while left:
        block = f.read(min(BLOCK, left))
        if not block:
            raise Fault(f"{f.name}: ends {left} bytes early; download it again")
        yield block
        left -= len(block)
