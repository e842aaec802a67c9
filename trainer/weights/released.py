"""Tensors of a released checkpoint: names, types, shapes, places and checksums, read without a tensor library.

The checksum of a tensor covers only its bytes and not their place, so the digest of a model does not depend on the
division into files. It is a 128-bit XXH3, which detects loss and confusion, but not forgery. The digests of the store
and of the Hub detect forgery; SHA-256 here would take a third of a conversion's time. Older bases have SHA-256, which
the length of a recorded checksum shows. trainer/checks/inputs.py has already checked that the files exist and have the
length in their headers.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from conf import families, model_facts
from conf.families.parts import tensors
from conf.model_files import config_json, quantization, weights
from conf.model_files.quantization import Packed
from conf.model_files.weights import Entry
from contract import json_object
from contract.faults import Fault, named
from trainer.startup import device

SOURCE = "source.json"  # in a converted model: type, shape and checksum of each released tensor
BLOCK = 2**18  # bytes read at once; fits into a core's cache
CHECKSUMS = "xxh3_128"
SHA256_DIGITS = 64  # of a checksum that an earlier version has recorded
# Lowest value that is not finite, without the sign, and the unsigned integer that holds it.
EXPONENTS = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    quantization.FP8: ("<u1", 0x7F),
}
_memory: list[memoryview] = []  # free blocks
EXTRA, MISSING = "tensors that nothing in the model uses", "tensors missing"
MISSHAPEN = "tensors of the wrong shape"
# In old checkpoints of Llama, and GPT-2's causal masks; every model class computes them.
COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$|\bh\.\d+\.attn\.(masked_)?bias$")


@dataclass(frozen=True)
class Model:
    folder: Path
    config: dict
    tensors: dict[str, Entry]  # as in the files
    packed: dict[str, Packed] = field(default_factory=dict)  # quantised weights, each consisting of several tensors

    @cached_property
    def weights(self) -> dict[str, Entry | Packed]:
        """Return the model's weights: the tensors, with one weight for all tensors of a quantised weight."""
        weights = {one.codes: (name, one) for name, one in self.packed.items()}
        weights |= {name: (name, entry) for name, entry in self.tensors.items() if name not in self.weight_of}
        return dict(weights[name] for name in self.tensors if name in weights)

    @cached_property
    def weight_of(self) -> dict[str, str]:
        """Return the names of quantised weights by the names of their codes and scales."""
        return {part: name for name, one in self.packed.items() for part in one.tensors}

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the tensors of a weight."""
        return self.packed[name].tensors if name in self.packed else (name,)

    def files(self) -> list[str]:
        return sorted({entry.file for entry in self.tensors.values()})

    def stamps(self) -> dict[str, list[int]]:
        """Return size and time of each file. If both are unchanged, the checksums are assumed to be unchanged."""
        stats = {file: (self.folder / file).stat() for file in self.files()}
        return {file: [stat.st_size, stat.st_mtime_ns] for file, stat in stats.items()}


def read(folder: Path) -> Model:
    config, tensors = config_json.read(folder / config_json.NAME), weights.tensors(folder)
    with named(folder, ValueError):
        return Model(folder, config, tensors, quantization.packed(config, tensors))


def recorded_sums(base: Path) -> dict[str, str]:
    """Return the checksums of the tensors from which the base was made."""
    return {name: checksum for name, (_, _, checksum) in json_object.read(base / SOURCE).items()}


def unlike(base: Path, tensors: Mapping[str, Entry]) -> list[str]:
    """Return the names of tensors whose type, shape or existence differs from the release of the base."""
    recorded = json_object.read(base / SOURCE)
    current = {name: [entry.dtype, list(entry.shape)] for name, entry in tensors.items()}
    return sorted(name for name in recorded.keys() | current.keys() if recorded.get(name, [])[:2] != current.get(name))


def repeated(model: Model) -> dict[str, str]:
    """Return tensors that the architecture defines as copies, with their originals.

    Megatron has one embedding and one output layer. The releases of GLM-4.5+ and DeepSeek-V3 repeat them for each
    multi-token-prediction layer; a release with tied embeddings may include its output layer.
    """
    family = families.of(model.config)
    tied = model.config.get("tie_word_embeddings", family.defaults.get("tie_word_embeddings"))
    embedding = family.embedded(model.tensors)
    head = embedding if tied else "lm_head.weight"
    copies = {"lm_head.weight": head} if tied else {}
    for layer in mtp_layers(model):
        prefix = f"model.layers.{layer}."
        copies |= {prefix + "embed_tokens.weight": embedding, prefix + "shared_head.head.weight": head}
    return {copy: original for copy, original in copies.items() if copy in model.weights}


def mtp_layers(model: Model) -> range:
    facts = model_facts.facts_from_hf(model.config)
    return range(facts.layers, facts.layers + facts.mtp_layers)


def of_mtp(model: Model) -> dict[str, tuple[int, str]]:
    """Return the tensors of MTP layers by name: the number of the layer, and the name within it as in DeepSeek-V3."""
    ahead, layers, found = families.of(model.config).ahead, mtp_layers(model), {}
    for name in model.weights:
        if layers and ahead and name.startswith(ahead):
            found[name] = layers[0], tensors.within_ahead(name.removeprefix(ahead))
        elif (layer := weights.layer_of(name)) in layers:
            found[name] = layer, name.split(".", 3)[-1]
    return found


def copied(model: Model) -> set[str]:
    """Return the names of tensors that are not trained; an export copies them."""
    family = families.of(model.config)
    prefixes = family.copied + family.unused(model_facts.facts_from_hf(model.config), family.root(model.weights))
    prefixes += (family.ahead,) if family.ahead and not mtp_layers(model) else ()
    return {name for name in model.weights if name.startswith(prefixes)}


def checksums(
    model: Model, names: Iterable[str], recorded: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return the checksum of each of these tensors, and the names of tensors with values that are not finite.

    Scales of quantised weights must also be above 0. Each tensor is read once, by several threads. `recorded` are
    checksums to compare with; they select the kind of checksum.
    """
    entries, recorded = {name: model.tensors[name] for name in names}, recorded or {}
    scales = {name for one in model.packed.values() for name in one.of_scales}
    with ThreadPoolExecutor(device.cores()) as pool:

        def read(name: str) -> tuple[str, bool]:
            entry, found, finite = entries[name], new_sum(recorded.get(name, "")), True
            for block in blocks(model.folder / entry.file, entry):
                found.update(block)
                no_scale = name in scales and _has_no_scale(block, entry.dtype)
                finite = finite and is_finite(block, entry.dtype) and not no_scale
            return found.hexdigest(), finite

        found = list(pool.map(read, entries))
    sums = {name: checksum for name, (checksum, _) in zip(entries, found, strict=True)}
    return sums, [name for name, (_, finite) in zip(entries, found, strict=True) if not finite]


def not_finite(model: Model, names: list[str]) -> Fault:
    text = f"{len(names)} tensors hold numbers that are infinite or not a number"
    if any({*one.of_scales} & {*names} for one in model.packed.values()):
        text += ", or scales that are not above 0"
    return Fault(f"{model.folder}: {text}: {enumerate_names(sorted(names))}; download it again")


def has_sum(path: Path, entry: Entry, recorded: str) -> bool:
    """Whether a file has bytes with the recorded checksum at this place; false if it is missing or too short."""
    try:
        return checksum(path, entry, recorded) == recorded
    except (OSError, Fault):
        return False


def checksum(path: Path, entry: Entry, recorded: str = "") -> str:
    """Return the checksum of the bytes at this place of a file, of the same kind as `recorded`."""
    found = new_sum(recorded)
    for block in blocks(path, entry):
        found.update(block)
    return found.hexdigest()


def digest(model: Model, sums: dict[str, str]) -> str:
    lines = [[name, entry.dtype, entry.shape, sums[name]] for name, entry in sorted(model.tensors.items())]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def enumerate_names(names: Iterable[str], limit: int = 10) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def require_none(folder: Path, problems: Mapping[str, Collection[str]]) -> None:
    """Raise a Fault with the names of each problem that has some."""
    lines = [f"{text} ({len(names)}): {enumerate_names(sorted(names))}" for text, names in problems.items() if names]
    if lines:
        raise Fault(f"{folder}: {'; '.join(lines)}")


def new_sum(recorded: str):
    """Return an empty checksum of the same kind as `recorded`."""
    return hashlib.sha256() if len(recorded) == SHA256_DIGITS else xxhash.xxh3_128()


def is_finite(block: bytes | memoryview, dtype: str) -> bool:
    """Whether all values are finite.

    Values whose exponent bits are all set are infinite or NaN; in FP8's e4m3, those with all bits but the sign set.
    Integers and other kinds of FP8 always count as finite.
    """
    if dtype not in EXPONENTS:
        return True
    width, exponent = EXPONENTS[dtype]
    numbers = np.frombuffer(block, width)
    if not numbers.size:
        return True
    # Read as integers, non-finite values of each sign are larger than all finite ones.
    sign = 1 << (8 * numbers.itemsize - 1)
    return bool(numbers.view(f"<i{numbers.itemsize}").max() < exponent and numbers.max() < exponent | sign)


def _has_no_scale(block: bytes | memoryview, dtype: str) -> bool:
    """Whether a scale is 0, negative or, for one-byte exponents, NaN."""
    if dtype not in EXPONENTS:
        return bool((np.frombuffer(block, np.uint8) == 0xFF).any())
    width, _ = EXPONENTS[dtype]
    numbers = np.frombuffer(block, width)
    return bool(((numbers == 0) | (numbers >> (8 * numbers.itemsize - 1) != 0)).any())


def read_ahead(model: Model, names: Iterable[str]) -> None:
    """Make the kernel read these tensors from the disk in the background."""
    for entry in (model.tensors[name] for name in names):
        with (model.folder / entry.file).open("rb") as f:
            if entry.size and not _is_in_memory(f.fileno(), entry):  # for the kernel, 0 means up to the end
                os.posix_fadvise(f.fileno(), entry.start, entry.size, os.POSIX_FADV_WILLNEED)


def _is_in_memory(descriptor: int, entry: Entry) -> bool:
    """Whether the kernel has both ends of a tensor in memory; checking all of it would cost as much as reading it."""
    ends = entry.start, entry.start + entry.size - 1
    try:
        return all(os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) for at in ends)
    except OSError:  # not in memory, or the file system does not support this
        return False


def blocks(path: Path, entry: Entry) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks; each block is invalid after the next is requested."""
    left = entry.size
    try:
        memory = _memory.pop()
    except IndexError:
        memory = memoryview(bytearray(BLOCK))
    try:
        with path.open("rb") as f:
            f.seek(entry.start)
            while left:
                count = f.readinto(memory[:left])  # pyright: ignore[reportAttributeAccessIssue]
                if not count:
                    raise Fault(f"{path}: ends {left} bytes early; download it again")
                yield memory[:count]
                left -= count
    finally:
        _memory.append(memory)  # reuse it: the kernel clears new memory page by page
