"""A tensor in a file, read by rows into reused memory, and checksummed while the rows are in the cache.

Mapping rows that are read once costs the kernel as much as copying them, and they would be read again for the checksum.
A thread reuses its memory for one tensor after another: freeing and allocating takes longer than merging a tensor, as
the kernel clears memory page by page.
"""

import threading
from pathlib import Path

import torch

from conf.model_files.weights import Entry
from contract import regular_files
from contract.faults import named
from trainer.weights import released
from trainer.weights.mapped import mapped_numbers

LARGEST = 2**26  # bytes kept for the next tensor
_kept = threading.local()


def take(use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized memory of `count` values. It invalidates this thread's previous memory of the same use."""
    size = count * dtype.itemsize
    memory = getattr(_kept, use, None)
    if memory is None or len(memory) < size:
        memory = torch.empty(size, dtype=torch.uint8)
        if size <= LARGEST:
            setattr(_kept, use, memory)
    return memory[:size].view(dtype)


class ReadRows:
    """A tensor with at least one dimension, read by rows in order.

    Rows are invalid after this thread requests others for the same use. `recorded` is the checksum to compare with; it
    also selects the kind of checksum.
    """

    def __init__(self, path: Path, entry: Entry, dtype: torch.dtype, use: str, recorded: str = ""):
        self.path, self.entry, self.dtype, self.use = path, entry, dtype, use
        self.shape = torch.Size(entry.shape)
        self.sum, self.recorded, self.read = released.new_sum(recorded), recorded, 0

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, stop, _ = rows.indices(self.shape[0])
        assert first == self.read, f"{self.path}: row {first} is requested after row {self.read}"
        width = self.entry.size // self.shape[0]
        content = take(self.use, (stop - first) * width, torch.uint8)
        file = regular_files.open_regular(self.path)
        with file, named(self.path, (OSError, ValueError)):
            mapped_numbers.fill(file, self.entry.start + first * width, content)
        self.sum.update(content.numpy().data)
        self.read = stop
        return content.view(self.dtype).view(stop - first, *self.shape[1:])

    def has_sum(self, expected: str) -> bool:
        """Whether all rows were read and have this checksum together."""
        return self.read == self.shape[0] and self.sum.hexdigest() == expected

    @property
    def is_recorded(self) -> bool:
        return self.has_sum(self.recorded)
