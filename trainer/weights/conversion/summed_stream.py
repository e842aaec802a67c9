"""Stream that computes a checksum for each piece of a file, and aligns pieces so their values can be mapped."""

import io

import xxhash

from trainer.weights import short_writes, torch_dist


class SummedStream(io.IOBase):
    """Stream to which torch writes a file's pieces."""

    def __init__(self, stream: io.IOBase):
        self.stream, self.piece, self.start, self.end, self.error = stream, xxhash.xxh3_128(), 0, 0, None
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
        """Return the position; torch calls this before and after each piece. Readers skip the zeros after a piece."""
        if over := self.end % torch_dist.ALIGNED:
            self.write(bytes(torch_dist.ALIGNED - over))
        self.end_piece()
        return self.end

    def end_piece(self) -> None:
        if self.end > self.start:
            self.sums[self.start] = self.piece.hexdigest()
            self.piece, self.start = xxhash.xxh3_128(), self.end

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
