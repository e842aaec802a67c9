"""The header of a safetensors file, checked as strictly as the safetensors library does when it loads the file.

A file consists of 8 bytes with the length of the header, the header in JSON, and the bytes of the tensors. There are no
gaps, no overlaps and no bytes after the last tensor.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from contract import json_object
from contract.faults import Fault
from contract.regular_files import LARGEST, open_regular

# Bits of an element of every type in safetensors 0.8.
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
LENGTH = 8  # bytes with the length of the header
DIMENSIONS = 64  # more than any tensor library supports
AGAIN = "download it again"


@dataclass(frozen=True)
class Entry:
    """Type, shape and place of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    file: str  # name of the file, without the folder
    start: int  # offset of its bytes in the file
    size: int


def read(path: Path) -> dict[str, Entry]:
    """Return the tensors by name, in the order of their bytes."""
    with open_regular(path) as file:
        file.seek(0, 2)
        size = file.tell()
        file.seek(0)
        first = file.read(LENGTH)
        length = struct.unpack("<Q", first)[0] if len(first) == LENGTH else size
        if LENGTH + length > size:
            raise Fault(f"{path}: truncated: {size} bytes do not even hold the header; {AGAIN}")
        if length > LARGEST:
            raise Fault(f"{path}: no safetensors header: {length} bytes long, but {LARGEST} are allowed; {AGAIN}")
        text = file.read(length)
    try:
        header = json_object.parse(text, str(path))
    except Fault as fault:
        raise Fault(f"{path}: no safetensors header: {str(fault).removeprefix(f'{path}: ')}; {AGAIN}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise Fault(f"{path}: no safetensors header: __metadata__ contains values that are not strings; {AGAIN}")
    tensors = {name: _tensor(path, name, entry, LENGTH + length) for name, entry in header.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)))
    _check_places(path, tensors, LENGTH + length, size)
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> Entry:
    def wrong(problem: str) -> Fault:
        return Fault(f"{path}: no safetensors header: tensor {json_object.show(name)}: {problem}; {AGAIN}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise wrong("its entry lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise wrong(f"dtype is {json_object.show(dtype)}, which is not one of {', '.join(BITS)}")
    if not _sizes(shape) or len(shape) > DIMENSIONS:
        raise wrong(f"shape is {json_object.show(shape)}, which is not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"data_offsets are {json_object.show(offsets)}, which are not a beginning and an end")
    begin, end = offsets
    if prod(shape) * BITS[dtype] != 8 * (end - begin):
        raise wrong(f"shape {json_object.show(shape)} of {dtype} does not match its bytes, {end - begin}")
    return Entry(dtype, tuple(shape), path.name, start + begin, end - begin)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)


def _check_places(path: Path, tensors: dict[str, Entry], start: int, size: int) -> None:
    end, before = start, ""
    for name, tensor in tensors.items():
        if tensor.start != end:
            how = "overlaps" if tensor.start < end else "leaves a gap after"
            other = f"tensor {json_object.show(before)}" if before else "the header"
            text = f"tensor {json_object.show(name)} {how} {other}"
            raise Fault(f"{path}: no safetensors header: {text}; {AGAIN}")
        end, before = tensor.start + tensor.size, name
    if end != size:
        what = "truncated" if end > size else "longer than it should be"
        raise Fault(f"{path}: {what}: {size} bytes, but its tensors need {end}; {AGAIN}")
