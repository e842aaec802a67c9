"""Read tensors out of a torch_dist checkpoint by their Megatron names: one process, no model, no process group.

Such a checkpoint holds each tensor whole, under a name that does not depend on the layout it was saved at, in pieces
that do. Layers that are all alike are stacked into one tensor, and so are the experts of a layer; read() touches only
the pieces that a layer or an expert needs, so memory stays that of one weight matrix. Megatron's own loader would want
the model first, in memory, at some layout.

The optimizer's tensors, random states and Transformer Engine's _extra_state are left aside.
"""

import io
import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

NOT_WEIGHTS = re.compile(r"^(optimizer|rng_state|common_state|rerun_state_machine_state)\b|_extra_state")
STACKED_LAYERS = re.compile(r"^(?P<stack>(?:\w+\.)*layers)\.(?=\D)")


@dataclass(frozen=True)
class Place:
    """Where a weight lies: a stored tensor, the indices of layer and expert in it, and the pieces that hold it."""

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkStorageMetadata, ...]


@dataclass(frozen=True)
class Stored:
    folder: Path
    metadata: Metadata
    places: dict[str, Place]  # by Megatron's name; of an expert's weight as in a grouped layer: ...linear_fc1.weight7


def open_checkpoint(folder: Path) -> Stored:
    metadata = FileSystemReader(folder).read_metadata()
    places = {}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not NOT_WEIGHTS.search(key):
            places |= dict(_places(key, stored))
    return Stored(folder, metadata, places)


def read(stored: Stored, place: Place) -> torch.Tensor:
    """One weight, put together from the pieces that it was saved in."""
    depth = len(place.index)
    whole = torch.empty(place.shape, dtype=place.dtype)
    filled = 0
    for chunk in place.chunks:
        piece = _load(stored, place.key, chunk.offsets)
        piece = piece[tuple(i - start for i, start in zip(place.index, chunk.offsets, strict=False))]
        target = tuple(slice(o, o + n) for o, n in zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True))
        whole[target] = piece
        filled += piece.numel()
    assert filled == whole.numel(), f"{place.key}{list(place.index)}: {filled} of {whole.numel()} elements are stored"
    return whole


def _places(key: str, stored: TensorStorageMetadata):
    shape = tuple(stored.size)
    layers = shape[:1] if STACKED_LAYERS.match(key) else ()
    experts = shape[len(layers) : len(layers) + 1] if ".experts.experts." in key else ()
    depth = len(layers) + len(experts)
    chunks = defaultdict(list)
    for chunk in stored.chunks:
        spans = zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True)
        for index in itertools.product(*(range(start, start + size) for start, size in spans)):
            chunks[index].append(chunk)
    for index, pieces in chunks.items():
        name = key.replace(".experts.experts.", ".experts.")
        if layers:
            name = STACKED_LAYERS.sub(rf"\g<stack>.{index[0]}.", name)
        if experts:
            name += str(index[-1])
        yield name, Place(key, index, shape[depth:], stored.properties.dtype, tuple(pieces))


def _load(stored: Stored, key: str, offsets) -> torch.Tensor:
    place = stored.metadata.storage_data[MetadataIndex(key, offsets)]
    with (stored.folder / place.relative_path).open("rb") as f:
        f.seek(place.offset)
        return torch.load(io.BytesIO(f.read(place.length)), map_location="cpu", weights_only=True)
