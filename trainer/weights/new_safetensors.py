"""Headers and indexes of safetensors files whose tensors are written one after another."""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from conf.model_files import weights
from conf.model_files.safetensors_header import BITS


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


def write_index(folder: Path, size: int, files: Mapping[str, str]) -> None:
    """Write the index of a model of `size` bytes, with the file of each tensor."""
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / weights.INDEX).write_text(json.dumps(index, indent=2) + "\n")
