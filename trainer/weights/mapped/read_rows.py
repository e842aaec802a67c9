"""A tensor in a file, read by rows into memory that the thread keeps, and summed up while a core has them at hand.

To map rows costs the kernel as much as to copy them, where they are read once, and they would have to be read once more
for their checksum.
"""

import os
from pathlib import Path

import torch

from conf.model_files.weights import Entry
from contract import regular_files
from contract.faults import Fault
from trainer.weights import released
from trainer.weights.mapped import kept_memory


class ReadRows:
    """A tensor of one dimension or more, given by rows, from the first to the last.

    Rows are gone when this thread asks for others for the same use. `recorded` is a checksum that theirs is to be
    compared with, and so of its kind.
    """

    def __init__(self, path: Path, entry: Entry, dtype: torch.dtype, use: str, recorded: str = ""):
        self.path, self.entry, self.dtype, self.use = path, entry, dtype, use
        self.shape = torch.Size(entry.shape)
        self.sum, self.recorded, self.read = released.new_sum(recorded), recorded, 0

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, stop, _ = rows.indices(self.shape[0])
        assert first == self.read, f"{self.path}: row {first} is asked for behind row {self.read}"
        width = self.entry.size // self.shape[0]
        found = kept_memory.take(self.use, (stop - first) * width, torch.uint8)
        content = found.numpy().data
        with regular_files.open_regular(self.path) as file:
            _fill(content, file.fileno(), self.entry.start + first * width, self.path)
        self.sum.update(content)
        self.read = stop
        return found.view(self.dtype).view(stop - first, *self.shape[1:])

    def has_sum(self, wanted: str) -> bool:
        """Whether all rows were given, and have this checksum together."""
        return self.read == self.shape[0] and self.sum.hexdigest() == wanted

    @property
    def is_recorded(self) -> bool:
        return self.has_sum(self.recorded)


def _fill(content: memoryview, descriptor: int, start: int, path: Path) -> None:
    done = 0
    while done < len(content):
        try:
            count = os.preadv(descriptor, [content[done:]], start + done)
        except OSError as error:
            raise Fault(f"{path}: {error.strerror}") from None
        if not count:
            raise Fault(f"{path}: ends {len(content) - done} bytes early")
        done += count
