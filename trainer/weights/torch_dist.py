"""Reader of a torch_dist checkpoint's tensors by their Megatron names: one process, no model, no process group.

In a torch_dist checkpoint, the names of tensors do not depend on the layout at which it was saved, but the pieces of
the tensors do. Identical layers are stacked into one tensor, and so are the experts of a layer. read() touches only the
bytes of one layer or expert, and maps them from the file if they are contiguous. It therefore needs memory for only one
weight matrix. Megatron's loader would need a model in memory first, at some layout.

Tensors of the optimizer, random states and Transformer Engine's _extra_state are ignored.

If training wrote digests of its memory (trainer/weights/digests.py), every weight is compared with its digest. A Fault
names a weight that is missing, assembled wrongly, or from another layer or step. Without digests, each piece is
compared once with its checksum (trainer/weights/file_sums.py). Without checksums of pieces, the file is compared with
its checksum. If the file has no checksum, or a different one, the piece is compared with the checksum in its archive.

Several threads may read weights.
"""

import itertools
import pickle
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from conf.model_files import weights
from contract import regular_files
from contract.faults import Fault
from trainer.weights import digests, file_sums
from trainer.weights.mapped import mapped_piece
from trainer.weights.released import enumerate_names

NOT_WEIGHTS = re.compile(
    r"^((chained_\d+\.)?optimizer|rng_state|common_state|rerun_state_machine_state)\b|_extra_state"
)
RELEASED = "released"  # instead of a file name: pieces of a base without weights are in the release
ALIGNED = 64  # bytes: pieces that begin at a multiple can be mapped, because torch.save aligns values to it
STACKED_LAYERS = re.compile(r"^(?P<stack>(?:\w+\.)*layers)\.(?=\D)")
# Classes in a checkpoint's description, by their module.
DESCRIBED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {"WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PurePath"},
    "collections": {"OrderedDict"},
}
# megatron-core's classes before 0.19, by torch's class that each extends. They also hold the plan of the save.
EXTENDED = {"MCoreMetadata": Metadata, "MCoreSavePlan": SavePlan}
# Sections of a fused layer, which is cut over tensor-parallel ranks section by section, in the order of its rows.
SECTIONS = ("query", "key", "value", "z", "x", "B", "C", "dt", "beta", "alpha")


@dataclass(frozen=True)
class Place:
    """Place of a weight: a stored tensor, the indices of layer and expert in it, and its pieces."""

    name: str
    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkStorageMetadata, ...]
    sections: tuple["Place", ...] = ()  # if the weight is stored in sections: the place of each, in order


@dataclass(frozen=True)
class Stored:
    folder: Path
    metadata: Metadata
    places: dict[str, Place]  # by stored name; experts as in a grouped layer: ...linear_fc1.weight7
    in_memory: dict | None = None  # result of digests.read(): digests of training's memory
    seen: set[str] = field(default_factory=set)  # names of the weights that were read
    layouts: dict[tuple, mapped_piece.Layout] = field(default_factory=dict)  # of the pieces that were read
    sums: dict[str, str] = field(default_factory=dict)  # of its pieces, or of its files
    whole: dict[str, bool] = field(default_factory=dict)  # by file: whether its checksum is correct
    looking: threading.Lock = field(default_factory=threading.Lock)  # held while a file is compared
    # Makes a box, by its offsets and sizes, of a piece that is in the release.
    make: Callable[[MetadataIndex, Sequence[int], Sequence[int]], torch.Tensor] | None = None
    is_new: bool = False  # just written by this process: its checksums are not compared

    @cached_property
    def weights(self) -> dict[str, Place]:
        """Places by Megatron's name, with the sections of a fused layer as one weight."""
        weights, sections = dict[str, Place](), defaultdict[str, dict[str, Place]](dict)
        for name, place in self.places.items():
            whole, _, section = name.rpartition(".")
            if section in SECTIONS:
                sections[whole][section] = place
            else:
                weights[name] = place
        for name, parts in sections.items():
            ordered = tuple(parts[section] for section in SECTIONS if section in parts)
            shape = (sum(part.shape[0] for part in ordered), *ordered[0].shape[1:])
            weights[name] = replace(ordered[0], name=name, shape=shape, sections=ordered)
        return weights

    @property
    def digests(self) -> dict[str, str]:
        return self.in_memory["digests"] if self.in_memory else {}


class _Description(pickle.Unpickler):
    """Torch's description of a checkpoint. Anything else in the pickle is refused, as it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name in EXTENDED:
            return EXTENDED[name]
        if name in DESCRIBED.get(module, ()) or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's description")


def open_checkpoint(folder: Path) -> Stored:
    try:
        with (folder / weights.DESCRIPTION).open("rb") as file:
            metadata: Metadata = _Description(file).load()
    except OSError as error:
        raise Fault(f"{error.filename or folder}: {error.strerror}") from None
    except Exception as error:  # pickle raises any type
        raise Fault(f"{folder / '.metadata'}: damaged ({type(error).__name__}); take another checkpoint") from None
    places = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not NOT_WEIGHTS.search(key):
            places |= dict(_places(key, stored))
    return Stored(folder, metadata, places, digests.read(folder), sums=file_sums.read(folder))


def require_all(stored: Stored) -> None:
    """Check that the checkpoint has exactly the weights that training had in memory, by name."""
    known, names = stored.digests.keys(), stored.places.keys()
    if known and known != names:
        raise Fault(
            f"{stored.folder}: {len(known - names)} of the {len(known)} tensors that training had in memory are not in "
            f"it: {enumerate_names(sorted(known - names)) or 'none'}; {len(names - known)} were not in memory: "
            f"{enumerate_names(sorted(names - known)) or 'none'}"
        )


def read(stored: Stored, place: Place) -> torch.Tensor:
    """Read one weight, assembled from its pieces."""
    stored.seen.add(place.name)
    if place.sections:
        return torch.cat([read(stored, section) for section in place.sections])
    whole = _box(stored, place, (0,) * len(place.shape), place.shape)
    _check(stored, place.name, [((0,) * whole.ndim, whole)])
    return whole


def rows(stored: Stored, place: Place) -> list[torch.Tensor]:
    """Read one weight as blocks of its rows, in order: its pieces, if they are blocks of rows.

    Nothing is assembled, because a vocabulary exceeds the memory for a part of a file.
    """
    stored.seen.add(place.name)
    if place.sections:
        return [block for section in place.sections for block in rows(stored, section)]
    pieces = sorted(_pieces(stored, place, (0,) * len(place.shape), place.shape), key=lambda piece: piece[0])
    are_rows = place.shape and all(piece.shape[1:] == place.shape[1:] for _, piece in pieces)
    if not are_rows or sum(len(piece) for _, piece in pieces) != place.shape[0]:
        return [read(stored, place)]
    _check(stored, place.name, pieces)
    return [piece for _, piece in pieces]


def place_of(stored: Stored, name: str) -> Place:
    place = stored.weights.get(name) or stored.places.get(name)  # or a section of a weight
    if place is None:
        raise Fault(f"{stored.folder}: holds no {name}")
    return place


def section_of(stored: Stored, name: str) -> tuple[str, int, int]:
    """Return the weight that a section belongs to, its number of rows, and the section's first row in it."""
    if name in stored.weights:
        return name, stored.weights[name].shape[0], 0
    whole = stored.weights[name.rpartition(".")[0]]
    before = itertools.takewhile(lambda section: section.name != name, whole.sections)
    return whole.name, whole.shape[0], sum(section.shape[0] for section in before)


def box(stored: Stored, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Read a part of a weight, assembled from its pieces."""
    return _box(stored, place_of(stored, name), offsets, sizes)


def _box(stored: Stored, place: Place, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    result, filled = torch.empty(sizes, dtype=place.dtype), 0
    for begins, piece in _pieces(stored, place, offsets, sizes):
        if piece.shape == sizes:  # nothing to assemble
            return piece
        result[tuple(slice(begin, begin + size) for begin, size in zip(begins, piece.shape, strict=True))] = piece
        filled += piece.numel()
    if filled != result.numel():
        raise Fault(f"{stored.folder}: {place.name}: {filled} of its {result.numel()} elements are stored")
    return result


def _pieces(
    stored: Stored, place: Place, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield the pieces that a box of a weight consists of, each with its offsets in the box."""
    before = 0
    for section in place.sections:
        first, last = max(offsets[0] - before, 0), min(offsets[0] + sizes[0] - before, section.shape[0])
        if first < last:
            part = _pieces(stored, section, (first, *offsets[1:]), (last - first, *sizes[1:]))
            yield from (((row + before + first - offsets[0], *begins), piece) for (row, *begins), piece in part)
        before += section.shape[0]
    if place.sections:
        return
    depth = len(place.index)
    for chunk in place.chunks:
        begins, lengths = chunk.offsets[depth:], chunk.sizes[depth:]
        spans = [
            (max(offset, begin), min(offset + size, begin + length))
            for offset, size, begin, length in zip(offsets, sizes, begins, lengths, strict=True)
        ]
        if any(first >= last for first, last in spans):
            continue
        index = tuple(i - start for i, start in zip(place.index, chunk.offsets, strict=False))
        inside = [(first - begin, last - first) for (first, last), begin in zip(spans, begins, strict=True)]
        piece = _load(stored, place.key, chunk.offsets, index, inside)
        yield tuple(first - offset for (first, _), offset in zip(spans, offsets, strict=True)), piece


def some_rows(stored: Stored, name: str, numbers: Sequence[int]) -> torch.Tensor:
    """Read only these rows of a weight: a vocabulary has pieces of a GB."""
    width = place_of(stored, name).shape[1:]
    return torch.cat([box(stored, name, (row, *(0,) * len(width)), (1, *width)) for row in numbers])


def _check(stored: Stored, name: str, pieces: list[tuple[tuple[int, ...], torch.Tensor]]) -> None:
    """Compare a weight, in pieces with their offsets, with the digest from training's memory."""
    if not stored.digests:
        return
    actual = digests.text(sum(int(digests.sums(piece, begins)) for begins, piece in pieces))
    if actual != stored.digests[name]:
        same = [other for other, digest in stored.digests.items() if digest == actual]
        cause = f"it is that of {same[0]}" if same else "it is of another step or another run, or damaged"
        raise Fault(f"{stored.folder}: {name} is not the tensor that training had in memory: {cause}")


def depth(key: str, dimensions: int) -> int:
    """Return the number of a stored tensor's first dimensions that are indices of layers and experts."""
    layers = bool(STACKED_LAYERS.match(key))
    shared = ".adapter.linear_" in key and dimensions == layers + 2  # a matrix for all experts
    return layers + (".experts.experts." in key and not shared)


def name_of(key: str, index: tuple[int, ...]) -> str:
    """Return Megatron's name of the weight at this index of layer and expert."""
    name = key.replace(".experts.experts.", ".experts.")
    if layers := bool(STACKED_LAYERS.match(key)):
        name = STACKED_LAYERS.sub(rf"\g<stack>.{index[0]}.", name)
    return name + str(index[-1]) if len(index) > layers else name


def _places(key: str, stored: TensorStorageMetadata):
    count = depth(key, len(stored.size))
    chunks = defaultdict(list)
    for chunk in stored.chunks:
        spans = zip(chunk.offsets[:count], chunk.sizes[:count], strict=True)
        for index in itertools.product(*(range(start, start + size) for start, size in spans)):
            chunks[index].append(chunk)
    for index, pieces in chunks.items():
        name = name_of(key, index)
        yield name, Place(name, key, index, tuple(stored.size)[count:], stored.properties.dtype, tuple(pieces))


def _load(
    stored: Stored, key: str, offsets: Sequence[int], index: tuple[int, ...], inside: list[tuple[int, int]]
) -> torch.Tensor:
    """Read a part, (first, count) of each dimension, of a stored piece at this index of layer and expert."""
    place = stored.metadata.storage_data.get(MetadataIndex(key, offsets))
    if place is None:
        raise Fault(f"{stored.folder}: {key}: the piece at {tuple(offsets)} is in no file")
    firsts, counts = [first for first, _ in inside], [count for _, count in inside]
    if place.relative_path == RELEASED:
        assert stored.make, f"{stored.folder} holds no weights"  # open it with trainer/weights/conversion/unwritten.py
        part = stored.make(MetadataIndex(key, offsets), [*index, *firsts], [1] * len(index) + counts)
        return part.reshape(counts)
    path = stored.folder / place.relative_path
    with regular_files.open_regular(path) as f:
        try:
            if (layout := stored.layouts.get((key, *offsets))) is None:
                layout = mapped_piece.layout(f, place.offset, place.length)
                if not (stored.digests or stored.is_new or _is_sound(stored, path, place, f, layout)):
                    raise ValueError("other numbers than were saved")
                stored.layouts[key, *offsets] = layout
            piece = mapped_piece.read(f, layout, index)
        except Exception as error:  # zipfile, pickle and mmap raise many types
            raise Fault(f"{path}: damaged where {key} lies ({type(error).__name__}); take another checkpoint") from None
    return piece[tuple(slice(first, first + count) for first, count in inside)]


def _is_sound(stored: Stored, path: Path, place: Any, file: BinaryIO, layout: mapped_piece.Layout) -> bool:
    """Whether a piece is intact: its checksum is correct, or its file's."""
    name = place.relative_path
    if known := stored.sums.get(file_sums.name(name, place.offset)):
        return file_sums.of(path, place.offset, place.length) == known
    with stored.looking:
        if name in stored.sums and name not in stored.whole:
            stored.whole[name] = file_sums.of(path) == stored.sums[name]
    return stored.whole.get(name, False) or mapped_piece.is_sound(file, place.offset, place.length, layout)
