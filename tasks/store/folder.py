"""Files of a folder as both stores see them: their names, their digests, and work spread over threads.

Symbolic links are followed, so that a folder whose files lie elsewhere (as in Hugging Face's cache) is handed over
whole; empty folders are left out, as an object store has none.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from contract import checksums, ownership
from contract.faults import Fault

BLOCK = 1 << 20  # bytes read at a time: hashlib lets other threads run meanwhile, and 16 threads hold 16 MiB
# Transfers at a time: a core hashes and sends some 400 MB/s, a connection carries about 80. With 10 on 2 cores, uploads
# to a server on the same host took 1.5 times as long.
THREADS = max(4, min(16, 2 * (os.cpu_count() or 1)))
PARTIAL = ".partial"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class File:
    """One file of an artifact, as recorded."""

    size: int
    sha256: str
    tag: str  # changes whenever the content may have changed


def walk(folder: Path) -> dict[str, Path]:
    """Every file below the folder by its relative name with slashes."""
    if not folder.is_dir():
        raise Fault(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; hand over a folder of files")
    return dict(sorted(_walk(str(folder), "", frozenset())))


def _walk(folder: str, prefix: str, above: frozenset) -> Iterator[tuple[str, Path]]:
    facts = os.stat(folder)
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        raise Fault(f"{folder}: a link to a folder above itself; remove it")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/", above | {here})
            elif entry.is_file():
                yield checked(prefix + entry.name), Path(entry.path)
            else:
                what = "a link to nothing" if entry.is_symlink() else "neither a file nor a folder"
                raise Fault(f"{entry.path!r}: {what}; remove it")


def checked(name: str) -> str:
    """The name, if it stays inside the folder that it is put in and every store can hold it."""
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise Fault(f"{name!r}: not a name inside a folder; relative names without . and .. are")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Fault(f"{name!r}: a file's name that is not UTF-8; rename it") from None
    return name


def inside(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Path of each name below the folder. Makes the folders in between and refuses links that lead out."""
    root = os.path.realpath(folder)
    places, seen = {}, set()
    for name in names:
        place = folder / checked(name)
        if place.parent not in seen:
            real = os.path.realpath(place.parent)
            if os.path.commonpath((root, real)) != root:
                raise Fault(f"{place}: a link leads out of {folder}; remove it")
            place.parent.mkdir(parents=True, exist_ok=True)
            seen.add(place.parent)
        places[name] = place
    return places


def sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as f:
        return checksums.of_stream(f)


def matches(path: Path, file: File) -> bool:
    try:
        return path.is_file() and path.stat().st_size == file.size and sha256(path) == file.sha256
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """A folder for partial files, while no other process fetches into the same folder.

    It is removed when all went well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / PARTIAL):
        yield folder / PARTIAL
        shutil.rmtree(folder / PARTIAL)


def _lock(partials: Path) -> IO[bytes]:
    while True:
        with contextlib.suppress(FileNotFoundError):
            partials.mkdir(exist_ok=True)
            f = open(partials / "lock", "ab")  # noqa: SIM115  the caller closes it, which unlocks
            ownership.lock(f.fileno())
            with contextlib.suppress(FileNotFoundError):
                if os.stat(partials / "lock").st_ino == os.fstat(f.fileno()).st_ino:
                    return f
            f.close()  # the process before us was done, and removed it


class Meter:
    """Counter of bytes from many threads. It reports at most twice a second, and at the end."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self.lock, self.last = threading.Lock(), 0.0

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            now = time.monotonic()
            if not self.progress or now < self.last + 0.5:
                return
            self.last = now
            self.progress(self.done, self.total)

    def end(self) -> None:
        if self.progress:
            self.progress(self.done, self.total)


Task = Callable[[], "Iterable[Task] | None"]


def work_through(tasks: Iterable[Task], threads: int = THREADS) -> None:
    """Run tasks in threads, the last one first. A task returns tasks to be run next.

    So tasks that have begun are ended before others begin. The first error stops the rest and is raised.
    """
    stack, errors, busy = list(tasks), [], 0
    turn = threading.Condition()

    def worker() -> None:
        nonlocal busy
        while True:
            with turn:
                while not stack and busy and not errors:
                    turn.wait()
                if errors or not stack:
                    return
                task = stack.pop()
                busy += 1
            more: Iterable[Task] | None = None
            try:
                more = task()
            except BaseException as error:  # handed to the caller's thread
                errors.append(error)
            with turn:
                busy -= 1
                stack.extend(more or ())
                turn.notify_all()

    workers = [threading.Thread(target=worker, daemon=True) for _ in range(threads)]
    for thread in workers:
        thread.start()
    try:
        for thread in workers:
            thread.join()
    except BaseException as error:  # Ctrl-C: what is under way ends, nothing new begins
        with turn:
            errors.append(error)
            turn.notify_all()
        for thread in workers:
            thread.join()
        raise
    if errors:
        raise errors[0]
