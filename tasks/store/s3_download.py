"""Download of a folder from S3: pieces of large files by several threads, verified, then renamed into place.

Unfinished files are in .partial/ in the folder, each with a journal of its finished pieces. A repeated transfer fetches
only the other pieces, and keeps files that already have the right size and SHA-256. A second process that fetches into
the same folder waits for the first one and then uses its files.

Files are not synced to disk: after a power failure the next transfer detects lost content by its digest.
"""

import contextlib
import functools
import hashlib
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from contract import checksums
from contract.amounts import unlike
from contract.faults import Fault
from tasks.store import folder as folders
from tasks.store.durable import plainly as disk_plainly
from tasks.store.folder import BLOCK, File, Meter, Progress, Task, work_through
from tasks.store.s3_bucket import S3Bucket
from tasks.store.s3_errors import ABSENT, ATTEMPTS, SLOW, broken, code_of, lost, pause, plainly, read

PIECE = 32 << 20  # bytes of a request, and of the loss of an interruption per thread; 30 ms of a request have no data
SMALL = 8 << 20  # bytes of a file that is fetched in one request, through memory


@dataclass
class Download:
    """Download of one file."""

    store: S3Bucket
    meter: Meter
    key: str
    file: File
    target: Path
    partial: Path
    resumed: bool = False
    left: int = 0  # number of unfinished pieces
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def journal(self) -> Path:
        return self.partial.with_suffix(".pieces")

    def begin(self) -> Iterable[Task] | None:
        size = self.file.size
        if folders.matches(self.target, self.file):
            self.meter.add(size)
            return None
        if size > SMALL:
            return self._pieces()
        data = b"".join(stream(self.store, self.key, 0, size, size))
        if checksums.of(data) != self.file.sha256:
            raise self._not_as_recorded()
        self.partial.write_bytes(data)
        self.partial.replace(self.target)
        self.meter.add(size)
        return None

    def _pieces(self) -> list[Task]:
        done, size = self._finished_pieces(), self.file.size
        self.resumed = bool(done)
        self.meter.add(sum(min(PIECE, size - piece * PIECE) for piece in done))
        with self.partial.open("ab") as f:
            f.truncate(size)
        left = [piece for piece in range(-(-size // PIECE)) if piece not in done]
        self.left = len(left)
        return [functools.partial(self._fetch, piece) for piece in reversed(left)] or [self._verify]

    def _fetch(self, piece: int) -> Iterable[Task] | None:
        at, size = piece * PIECE, self.file.size
        with self.partial.open("r+b") as f:
            f.seek(at)
            for block in stream(self.store, self.key, at, min(at + PIECE, size), size):
                f.write(block)
                self.meter.add(len(block))
        with self.lock, self.journal.open("a") as journal:
            journal.write(f"{piece}\n")
            self.left -= 1
            return None if self.left else [self._verify]

    def _verify(self) -> Iterable[Task] | None:
        if folders.sha256(self.partial) == self.file.sha256:
            self.partial.replace(self.target)
            self.journal.unlink()
            return None
        self.partial.unlink()
        self.journal.unlink()
        if not self.resumed:
            raise self._not_as_recorded()
        # A power failure may lose data that the journal lists: fetch the whole file again.
        self.meter.add(-self.file.size)
        return self._pieces()

    def _finished_pieces(self) -> set[int]:
        """Pieces in the journal, if the partial file has the right size."""
        try:
            if self.partial.stat().st_size != self.file.size:
                return set()
            pieces = {int(line) for line in self.journal.read_bytes().splitlines() if line.isdigit()}
        except FileNotFoundError:
            return set()
        return {piece for piece in pieces if piece * PIECE < self.file.size}

    def _not_as_recorded(self) -> Fault:
        uri = f"s3://{self.store.bucket}/{self.key}"
        return Fault(f"{uri}: its content differs from its record; create it again")


class S3Download(S3Bucket):
    """A bucket whose folders can be downloaded and compared with their records."""

    def get(self, prefix: str, files: dict[str, File], folder: Path, progress: Progress | None = None) -> None:
        meter = Meter(progress, sum(file.size for file in files.values()))
        with disk_plainly(folder), plainly(self):
            targets = folders.inside(folder, files)
            folder.mkdir(parents=True, exist_ok=True)
            self.client  # noqa: B018  created once, before the threads
            with folders.exclusive(folder) as partials:
                _check_space(folder, partials, files, targets)
                begin: list[Task] = []
                for name, file in sorted(files.items(), key=lambda item: item[1].size):
                    partial = partials / folders.partial_name(name, file.sha256)
                    begin.append(Download(self, meter, self.at(prefix, name), file, targets[name], partial).begin)
                work_through(begin)
        meter.end()

    def changed(self, prefix: str, files: dict[str, File], deep: bool = False) -> dict[str, str]:
        def problem(name: str, file: File, tag: str) -> str:
            digest = hashlib.sha256()
            try:
                for block in stream(self, self.at(prefix, name), 0, file.size, file.size):
                    digest.update(block)
            except Gone as gone:
                return gone.what
            return "" if digest.hexdigest() == file.sha256 else "content differs"

        with plainly(self):
            listed = self.keys(prefix)
            return folders.differing(files, listed, lambda name, file, tag: not deep and tag == file.tag, problem)


class Gone(Fault):
    """The object is missing, or has another size than its record."""

    what = ""


def stream(store: S3Bucket, key: str, start: int, stop: int, size: int) -> Iterator[bytes]:
    """Bytes from start to stop of an object of this size. After a broken connection the rest is requested again."""
    at, broke = start, 0
    while at < stop:
        ranged = {} if (at, stop) == (0, size) else {"Range": f"bytes={at}-{stop - 1}"}
        try:
            answer = store.client.get_object(Bucket=store.bucket, Key=key, **ranged)
        except Exception as error:
            if code_of(error) in ABSENT or code_of(error) == "InvalidRange":
                raise _gone(store, key, "missing" if code_of(error) in ABSENT else f"shorter than {size}") from None
            raise
        with contextlib.closing(answer["Body"]) as body:
            if answer["ContentLength"] != stop - at:
                raise _gone(store, key, f"size differs: {answer['ContentLength']} bytes, not {stop - at}")
            try:
                while at < stop and (block := read(store, body, min(BLOCK, stop - at))):
                    at += len(block)
                    broke = 0
                    yield block
            except broken() as error:
                broke += SLOW if isinstance(error, TimeoutError) else 0
        if at < stop:
            broke += 1
            if broke >= ATTEMPTS:
                raise lost(f"s3://{store.bucket}/{key}")
            pause(broke)


def _gone(store: S3Bucket, key: str, what: str) -> Gone:
    gone = Gone(f"s3://{store.bucket}/{key}: {what}; create it again")
    gone.what = what
    return gone


def _check_space(folder: Path, partials: Path, files: dict[str, File], targets: dict[str, Path]) -> None:
    """Check the free space before the transfer, not after hours. A file of the right size counts as complete."""
    whole = {name for name, target in targets.items() if target.is_file() and target.stat().st_size == files[name].size}
    need = sum(file.size for name, file in files.items() if name not in whole)
    need -= sum(path.stat().st_blocks * 512 for path in partials.iterdir())
    free = shutil.disk_usage(folder).free
    if need > free:
        needed, available = unlike(need, free)
        raise Fault(f"{folder}: {needed} are needed and {available} are free; free some space")
