"""Stream that computes a checksum for each piece of a file, and aligns pieces so their values can be mapped."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import io

import torch
import xxhash
from torch.utils.serialization import config

from trainer.weights import short_writes, torch_dist


class SummedStream(io.IOBase):
    """Stream to which torch writes a file's pieces."""

    def __init__(self, stream: io.IOBase):
        self.stream, self.piece, self.start, self.end = stream, xxhash.xxh3_128(), 0, 0
        self.error: OSError | None = None
        self.sums: dict[int, str] = {}

    def write(self, data) -> int:
        content = memoryview(data).cast("B")
        try:
            for block in short_writes.cut(content, self.end):
                self.piece.update(block)
                self.stream.write(block)
        except OSError as error:
            self.error = error
            raise
        self.end += len(content)
        return len(content)

    def tell(self) -> int:
        """Return the position, after writing zeros for the alignment. Call this before and after each piece."""
        if over := self.end % torch_dist.ALIGNED:
            self.write(bytes(torch_dist.ALIGNED - over))
        if self.end > self.start:
            self.sums[self.start] = self.piece.hexdigest()
            self.piece, self.start = xxhash.xxh3_128(), self.end
        return self.end

    def save(self, tensor: torch.Tensor) -> None:
        """Write a tensor with torch. If writing fails, raise the cause, which torch does not report.

        torch's CRC-32 is switched off, because it would take most of the time; pieces have another checksum.
        """
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = tensor.clone()  # torch writes the whole storage
        try:
            with config.patch("save.compute_crc32", False):
                torch.save(tensor.detach(), self)
        except Exception as error:
            raise self.error or error from error

    def flush(self) -> None:
        pass
