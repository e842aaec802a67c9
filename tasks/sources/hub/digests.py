"""Digests of the Hub and S3 for a file's content, each as one text, and partial files that are checked against them.

sha256:HEX            large files of the Hub; metadata of objects that tasks.store wrote
git:HEX               the SHA-1 of a git blob: small files of the Hub
md5:HEX               ETag of an S3 object that was sent in one piece, unless a key of KMS encrypts it
parts-BYTES:HEX-N     ETag of an object that was sent in N parts of BYTES bytes: the MD5 of the parts' MD5s
size:N                only the size is known
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from threading import Event
from typing import BinaryIO

CHUNK = 2**20


class Check:
    """Running check of content against a digest: update() takes all content, then right() returns the result."""

    def __init__(self, digest: str, size: int) -> None:
        self.kind, _, self.value = digest.partition(":")
        self.size, self.part = 0, int(self.kind.partition("-")[2] or 0)
        self._ends = b""  # MD5s of the earlier parts
        if self.kind == "sha256":
            self._hash = hashlib.sha256()
        elif self.kind == "git":
            self._hash = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        else:
            self._hash = hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes) -> None:
        if self.kind == "size":
            self.size += len(data)
            return
        view = memoryview(data)
        while self.part and self.size % self.part + len(view) >= self.part:
            rest = self.part - self.size % self.part
            self._add(view[:rest])
            self._ends += self._hash.digest()
            self._hash = hashlib.md5(usedforsecurity=False)
            view = view[rest:]
        self._add(view)

    def right(self) -> bool:
        if self.kind == "size":
            return self.value == str(self.size)
        if not self.part:
            return self.value == self._hash.hexdigest()
        ends = self._ends + (self._hash.digest() if self.size % self.part else b"")
        return self.value == f"{hashlib.md5(ends, usedforsecurity=False).hexdigest()}-{len(ends) // 16}"

    def _add(self, view: memoryview) -> None:
        self._hash.update(view)
        self.size += len(view)


class Partial:
    """Partial file of a download: its content is counted and checked as it grows."""

    def __init__(self, file: BinaryIO, digest: str, size: int, count: Callable, stopped: Event) -> None:
        self.file, self.digest, self.size, self.count, self.stopped = file, digest, size, count, stopped
        self.check, self.done = Check(digest, size), 0
        if file.tell() > size:
            file.truncate(0)
        file.seek(0)
        while chunk := file.read(CHUNK):
            self._add(chunk)

    def write(self, chunk: bytes) -> None:
        if self.stopped.is_set():
            raise CancelledError  # another file failed; this one stays partial
        self.file.write(chunk)
        self._add(chunk, sent=True)

    def restart(self) -> None:
        """Forget the content."""
        self.count(-self.done)
        self.file.truncate(0)
        self.check, self.done = Check(self.digest, self.size), 0

    def _add(self, chunk: bytes, **how: bool) -> None:
        self.check.update(chunk)
        self.done += len(chunk)
        self.count(len(chunk), **how)


def complete(
    path: Path, digest: str, size: int, count: Callable, stopped: Event, receive: Callable[[Partial], None]
) -> bool:
    """Complete a partial file by receive(partial). Returns False if its content is wrong twice.

    The bytes of an earlier attempt are kept. They may be damaged, so wrong content is fetched once more from the start.
    """
    for _ in range(2):
        with path.open("a+b") as file:
            partial = Partial(file, digest, size, count, stopped)
            receive(partial)
        if partial.check.right():
            return True
        count(-partial.done)
        path.unlink()
    return False


def holds(path: Path, digest: str, size: int, count) -> bool:
    """Whether the file exists with the content of this digest. If so, its bytes are counted."""
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            right = Partial(file, digest, size, count, Event()).check.right()
    except FileNotFoundError:
        return False
    if not right:
        count(-size)
    return right
