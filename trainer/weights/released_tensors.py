"""Tensors of a released checkpoint as torch sees them, by name or by rows: the one way from released files to values.

Each tensor maps its part of a file into memory: it costs memory where it is touched, and nothing is copied. Writing
into one changes that one alone, and no file. A file must not become shorter while a tensor of it is in use.
"""

import mmap
from pathlib import Path

import torch

from conf.model_files.weights import Entry
from contract import regular_files
from contract.faults import Fault
from trainer.weights.released import Model

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read(model: Model, name: str, rows: slice = slice(None)) -> torch.Tensor:
    """The tensor of this name, or a slice of its first dimension, in its released type."""
    return at(model.folder, model.tensors[name], rows)


def at(folder: Path, entry: Entry, rows: slice = slice(None)) -> torch.Tensor:
    """The tensor that lies at this place of a file of the folder, or rows of it."""
    dtype = DTYPES[entry.dtype]
    length = entry.shape[0] if entry.shape else 1
    first, stop, _ = rows.indices(length)
    shape = (max(0, stop - first), *entry.shape[1:]) if entry.shape else ()
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    start = entry.start + first * (entry.size // length)
    before = start % mmap.ALLOCATIONGRANULARITY  # where a mapping may begin
    path, size = folder / entry.file, count * dtype.itemsize
    with regular_files.open_regular(path) as f:
        try:
            content = mmap.mmap(f.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before)
        except (OSError, ValueError) as error:
            raise Fault(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if start % dtype.itemsize:  # a header may ask for it; torch wants numbers where those of the type may begin
        content, before = bytearray(content[before:]), 0
    return torch.frombuffer(content, dtype=dtype, count=count, offset=before).view(shape)
