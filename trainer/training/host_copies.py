"""Copies of a rank's tensors in host memory that all saves share. On a GPU this memory is pinned.

Pinned memory of torch's allocator would have sizes of powers of two.
"""

# pyright: reportOptionalMemberAccess=false

import ctypes
from typing import Any

import numpy as np
import torch

CHUNK, ALIGNED = 2**26, 64  # bytes


def return_freed_memory() -> None:
    """Return to the system what glibc keeps of freed memory: a gigabyte after a model of a gigabyte is loaded."""
    ctypes.CDLL(None).malloc_trim(0)


class HostCopies:
    def __init__(self):
        self.chunks: list[np.ndarray] = []
        self.used: list[int] = []

    def begin(self) -> None:
        """Give up all copies: the next ones take their memory."""
        if not self.chunks:
            return_freed_memory()
        self.used = [0] * len(self.chunks)

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a copy with a storage that holds nothing else, which torch.save writes. A GPU may still be copying."""
        dtype = dtype or tensor.dtype
        size = tensor.numel() * dtype.itemsize
        if not size:
            return torch.empty(tensor.shape, dtype=dtype, device="cpu")
        place = torch.from_numpy(self._place(size, tensor.is_cuda))
        return place.view(dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def own(self, data: Any) -> Any:
        """Return a copy of a tensor that is on the host and not one of the copies, else the data."""
        is_other = isinstance(data, torch.Tensor) and data.device.type == "cpu" and not self.has(data)
        return self.copy(data.detach()) if is_other else data

    def has(self, tensor: torch.Tensor) -> bool:
        place = tensor.data_ptr()
        return any(0 <= place - chunk.ctypes.data < chunk.size for chunk in self.chunks)

    def _place(self, size: int, pinned: bool) -> np.ndarray:
        fitting = (index for index, chunk in enumerate(self.chunks) if self.used[index] + size <= chunk.size)
        index = next(fitting, len(self.chunks))
        if index == len(self.chunks):
            chunk = np.empty(max(CHUNK, size), np.uint8)
            if pinned:
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(chunk.ctypes.data, chunk.size, 0))
            self.chunks.append(chunk)
            self.used.append(0)
        start = self.used[index]
        self.used[index] = -(-(start + size) // ALIGNED) * ALIGNED
        return self.chunks[index][start : start + size]
