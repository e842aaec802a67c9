"""Tensors of a released checkpoint as torch tensors, by name or by rows: the only access to released values.

Each tensor maps its part of a file into memory: it uses memory only when it is touched, and nothing is copied. Writing
to a tensor does not change the file. A file must not become shorter while a tensor of it is in use. Quantised weights
are unpacked into memory.
"""

from pathlib import Path

import torch

from conf.model_files.quantization import Packed
from conf.model_files.weights import Entry
from contract import regular_files
from contract.faults import Fault, named
from trainer.weights.mapped import mapped_numbers
from trainer.weights.quantised import unpack
from trainer.weights.released import Model

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}
CODES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}


def read(model: Model, name: str, rows: slice = slice(None)) -> torch.Tensor:
    """Return this weight, or a slice of its first dimension, in its released type or that of the unpacked weight."""
    if name not in model.packed:
        return at(model.folder, model.tensors[name], rows)
    packed = model.packed[name]
    for part in packed.besides:  # INT4's shape
        if (shape := at(model.folder, model.tensors[part]).tolist()) != list(packed.shape):
            raise Fault(f"{model.folder}: {part} is {shape}, but its codes are {list(packed.shape)}")
    first, stop, _ = rows.indices(packed.shape[0])
    codes = at(model.folder, model.tensors[packed.codes], slice(first, stop))
    return unpack.unpack(packed, codes, scales_of(model, packed), DTYPES[packed.dtype], first)


def scales_of(model: Model, packed: Packed) -> torch.Tensor:
    """Return the released scales; those of NVFP4 in fp32, with the factor of the whole weight."""
    scales = at(model.folder, model.tensors[packed.scales])
    if not packed.factor:
        return scales
    factor = at(model.folder, model.tensors[packed.factor]).reshape(())
    return scales.float() / factor if packed.scheme.divides else scales.float() * factor


def at(folder: Path, entry: Entry, rows: slice = slice(None)) -> torch.Tensor:
    """Return the tensor at this place of a file of the folder, or rows of it."""
    dtype = (DTYPES | CODES)[entry.dtype]
    length = entry.shape[0] if entry.shape else 1
    first, stop, _ = rows.indices(length)
    shape = (max(0, stop - first), *entry.shape[1:]) if entry.shape else ()
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    path, start = folder / entry.file, entry.start + first * (entry.size // length)
    file = regular_files.open_regular(path)
    with file, named(path, (OSError, ValueError)):
        return mapped_numbers.read(file, start, dtype, count).view(shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the values of a tensor as the bytes of a file."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
