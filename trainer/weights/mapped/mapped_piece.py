"""Access to a part of a tensor that torch.save wrote into a file, without reading the rest of the tensor.

A stored piece has the weights of all experts of a layer; reading it whole for each expert would multiply the work. Only
its header is read; the requested values are mapped from the file. torch's own mapping needs a file of one tensor, and
torch.load takes a millisecond for a header and checks no checksum; is_sound() does.
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
    """Place and order of a stored tensor's values; places count from the beginning of the file."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int  # index of its first element in its storage
    size: int  # of the storage, in bytes


class _Window(io.RawIOBase):
    """`length` bytes of a file from `start` on, presented as a file. Reads bypass the file's buffer."""

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
        target = memoryview(buffer)[: max(0, self.length - self.at)]
        count = os.preadv(self.file.fileno(), [target], self.start + self.at)
        self.at += count
        return count


class _Description(pickle.Unpickler):
    """Torch's description of one tensor. Anything else in the pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8  # its type follows the other arguments
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module == "torch" and name.endswith("Storage"):
            return torch.serialization.StorageType(name).dtype  # raises a KeyError for other names
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        kind, dtype, key, _, count = pid
        if (kind, key) != ("storage", "0"):
            raise pickle.UnpicklingError(f"a {kind} {key} is not the storage of one tensor")
        return dtype, count * dtype.itemsize


def _described(
    storage: tuple[torch.dtype, int], first: int, shape: tuple[int, ...], stride: tuple[int, ...], *more: Any
) -> tuple[Any, ...]:
    dtype = next((value for value in more if isinstance(value, torch.dtype)), storage[0])
    return dtype, tuple(shape), tuple(stride), first, storage[1]


def layout(file: BinaryIO, start: int, length: int) -> Layout:
    """Read the header of the tensor at this place. Raises errors of torch and of pickle for anything else."""
    archive: Any = torch._C.PyTorchFileReader(io.BufferedReader(_Window(file, start, length)))
    offset = archive.get_record_offset("data/0")
    described = _Description(io.BytesIO(archive.get_record("data.pkl"))).load()
    result = Layout(start + offset, *described)
    last = result.first + sum((n - 1) * step for n, step in zip(result.shape, result.stride, strict=True))
    if (last + 1) * result.dtype.itemsize > result.size or offset + result.size > length:
        raise ValueError("the values are not in the archive")
    return result


def is_sound(file: BinaryIO, start: int, length: int, layout: Layout) -> bool:
    """Whether the tensor's values have the checksum in their archive."""
    window: Any = io.BufferedReader(_Window(file, start, length))
    with zipfile.ZipFile(window) as records:
        record = next(info for info in records.infolist() if info.filename.endswith("/data/0"))
    numbers = mapped_numbers.read(file, layout.start, torch.uint8, layout.size, soon=True) if layout.size else None
    return zlib.crc32(b"" if numbers is None else numbers.numpy()) == record.CRC


def read(file: BinaryIO, layout: Layout, index: tuple[int, ...]) -> torch.Tensor:
    """Map the part of the tensor at this index of its first dimensions."""
    first = layout.first + sum(i * step for i, step in zip(index, layout.stride, strict=False))
    shape, stride = layout.shape[len(index) :], layout.stride[len(index) :]
    count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    numbers = mapped_numbers.read(file, layout.start + first * layout.dtype.itemsize, layout.dtype, count)
    return numbers.as_strided(shape, stride)
