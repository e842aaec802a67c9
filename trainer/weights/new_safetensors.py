"""Headers and indexes of safetensors files whose tensors are written one after another."""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from conf.model_files import weights
from conf.model_files.safetensors_header import BITS
from contract import groups

SHARD = 4 * 10**9  # maximum bytes of a file, unless a single tensor is larger


def header(file: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, weights.Entry]]:
    """Return the header of a file with tensors of these types and shapes, and their places in the file."""
    rows: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * BITS[dtype] // 8
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        places[name] = weights.Entry(dtype, shape, file, start, end - start)
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    content = struct.pack("<Q", len(text)) + text
    return content, {name: replace(place, start=len(content) + place.start) for name, place in places.items()}


def shards(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names of a model's files, each with the tensors in it, from their sizes in bytes."""
    parts = [*groups.up_to(SHARD, sizes.items())]
    files = [f"model-{number:05}-of-{len(parts):05}.safetensors" for number in range(1, len(parts) + 1)]
    return dict(zip(files if len(parts) > 1 else [weights.SINGLE], map(list, parts), strict=True))


def write_index(folder: Path, size: int, files: Mapping[str, str]) -> None:
    """Write the index of a model of `size` bytes, with the file of each tensor."""
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / weights.INDEX).write_text(json.dumps(index, indent=2) + "\n")
