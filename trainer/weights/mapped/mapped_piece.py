"""A part of a tensor that torch.save wrote somewhere in a file, read without the rest of it.

A stored piece holds the weights of all experts of a layer, and reading it whole for each of them would read it as many
times as there are experts. Only its header is read; the numbers asked for are mapped from the file. torch's own mapping
wants a file of one tensor, and torch.load takes a millisecond for a header and looks at no checksum; is_sound() does.
"""

import io
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from trainer.weights.mapped import mapped_numbers


@dataclass(frozen=True)
class Layout:
    """Place and order of a stored tensor's numbers; places count from the beginning of the file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int  # number of its first element in its storage
    size: int  # of the storage, in bytes

    @property
    def elements(self) -> int:
        return self.first + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))


class _Window(io.RawIOBase):
    """A file from `start` on, `length` bytes long, as if it were all of it. It is read past its own buffer."""

    def __init__(self, file: BinaryIO, start: int, length: int):
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        self.at = to + (0, self.at, self.length)[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        some = memoryview(buffer)[: max(0, self.length - self.at)]
        count = os.preadv(self.file.fileno(), [some], self.start + self.at)
        self.at += count
        return count


class _Description(pickle.Unpickler):
    """What torch.save says of one tensor. Anything else that a pickle may ask for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8  # whose type stands behind the other arguments
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module == "torch" and name.endswith("Storage"):
            return torch.serialization.StorageType(name).dtype  # raises a KeyError of another name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        kind, dtype, key, _, count = pid
        if (kind, key) != ("storage", "0"):
            raise pickle.UnpicklingError(f"a {kind} {key} is no storage of one tensor")
        return dtype, count * dtype.itemsize


def _described(
    storage: tuple[torch.dtype, int], first: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: Any
) -> tuple[Any, ...]:
    given = [one for one in more if isinstance(one, torch.dtype)]
    return given[0] if given else storage[0], tuple(shape), tuple(stride), first, storage[1]


def layout(file: BinaryIO, start: int, length: int) -> Layout:
    """Read the header of the tensor that lies there. Raises errors of torch and of pickle for anything else."""
    archive: Any = torch._C.PyTorchFileReader(io.BufferedReader(_Window(file, start, length)))
    offset = archive.get_record_offset("data/0")
    described = _Description(io.BytesIO(archive.get_record("data.pkl"))).load()
    found = Layout(start + offset, *described)
    if found.elements * found.dtype.itemsize > found.size or offset + found.size > length:
        raise ValueError("the numbers do not lie in the archive")
    return found


def is_sound(file: BinaryIO, start: int, length: int, layout: Layout) -> bool:
    """Whether the tensor's numbers are those that were saved, by the checksum of the archive that lies there."""
    window: Any = io.BufferedReader(_Window(file, start, length))
    with zipfile.ZipFile(window) as records:
        record = next(one for one in records.infolist() if one.filename.endswith("/data/0"))
    numbers = mapped_numbers.read(file, layout.start, torch.uint8, layout.size, soon=True) if layout.size else None
    return zlib.crc32(b"" if numbers is None else numbers.numpy()) == record.CRC


def read(file: BinaryIO, layout: Layout, index: tuple[int, ...]) -> torch.Tensor:
    """Map the part of the tensor at this index of its first dimensions."""
    first = layout.first + sum(i * step for i, step in zip(index, layout.stride, strict=False))
    shape, stride = layout.shape[len(index) :], layout.stride[len(index) :]
    count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    numbers = mapped_numbers.read(file, layout.start + first * layout.dtype.itemsize, layout.dtype, count)
    return numbers.as_strided(shape, stride)
