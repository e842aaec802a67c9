"""A tensor in a file, read by rows into reused memory, and checksummed while the rows are in the cache.

Mapping rows that are read once costs the kernel as much as copying them, and they would be read again for the checksum.
"""

from pathlib import Path

import torch

from conf.model_files.weights import Entry
from contract import regular_files
from contract.faults import Fault, named
from trainer.weights import released
from trainer.weights.mapped import kept_memory


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
        buffer = kept_memory.take(self.use, (stop - first) * width, torch.uint8)
        content = buffer.numpy().data
        with named(self.path, OSError), regular_files.open_regular(self.path) as file:
            file.seek(self.entry.start + first * width)
            filled = file.readinto(content)  # pyright: ignore[reportAttributeAccessIssue]
        if filled < len(content):
            raise Fault(f"{self.path}: ends {len(content) - filled} bytes early")
        self.sum.update(content)
        self.read = stop
        return buffer.view(self.dtype).view(stop - first, *self.shape[1:])

    def has_sum(self, expected: str) -> bool:
        """Whether all rows were read and have this checksum together."""
        return self.read == self.shape[0] and self.sum.hexdigest() == expected

    @property
    def is_recorded(self) -> bool:
        return self.has_sum(self.recorded)
