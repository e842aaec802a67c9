"""Functions on folders that both stores share: names and digests of files, comparison, and work in threads.

Symbolic links are followed: a folder of links to files elsewhere (as in Hugging Face's cache) is stored completely.
Empty folders are ignored, as an object store has none.
"""

import contextlib
import functools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from contract import checksums, ownership
from contract.faults import Fault

BLOCK = 1 << 20  # bytes per read: hashlib releases the interpreter lock, and 16 threads hold 16 MiB
# Concurrent transfers: a core hashes and sends about 400 MB/s, a connection carries about 80. With 10 on 2 cores,
# uploads to a server on the same host took 1.5 times as long.
THREADS = max(4, min(16, 2 * (os.cpu_count() or 1)))
PARTIAL = ".partial"

Progress = Callable[[int, int], None]
Kept = Callable[[str], bool]  # whether an object that the stored folder lacks stays, by its name


def none(_: str) -> bool:
    return False


@dataclass(frozen=True)
class File:
    """Record of one file of an artifact."""

    size: int
    sha256: str
    tag: str  # changes whenever the content may have changed


def walk(folder: Path) -> dict[str, Path]:
    """Every file below the folder by its relative name with slashes."""
    if not folder.is_dir():
        raise Fault(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; name a folder of files")
    return dict(sorted(_walk(str(folder), "", frozenset())))


def _walk(folder: str, prefix: str, above: frozenset) -> Iterator[tuple[str, Path]]:
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
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
    """The name, if it stays inside its folder and every store accepts it."""
    if not name or any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise Fault(f"{name!r}: not a name inside a folder; use a relative name without . and ..")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Fault(f"{name!r}: the name of this file is not UTF-8; rename it") from None
    return name


def inside(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Path of each name below the folder. Creates the folders between them and refuses links that lead out."""
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


def partial_name(name: str, digest: str) -> str:
    """Name of a partial file. It depends on the expected content: a part of another version is not continued."""
    return checksums.of(f"{digest} {name}")[:32] + ".part"


def sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as f:
        return checksums.of_stream(f)


def matches(path: Path, file: File) -> bool:
    try:
        return path.is_file() and path.stat().st_size == file.size and sha256(path) == file.sha256
    except FileNotFoundError:
        return False


def written_meanwhile(path: Path) -> Fault:
    return Fault(f"{path}: was written to while it was stored; store it when it is finished")


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[Path]:
    """Lock a folder against other fetching processes, and yield its folder for partial files.

    The folder for partial files is removed if no error occurs.
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
            f.close()  # the previous process has finished and removed the folder


class Meter:
    """Counter of bytes from many threads. It reports at most twice a second, and at the end.

    No thread waits while another thread reports.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done, self.sent = progress, total, 0, 0
        self._counting, self._reporting, self._reported = threading.Lock(), threading.Lock(), 0.0

    def add(self, count: int, sent: bool = False) -> None:
        with self._counting:
            self.done += count
            self.sent += count if sent else 0
        if time.monotonic() - self._reported >= 0.5 and self._reporting.acquire(blocking=False):
            try:
                self._report()
            finally:
                self._reporting.release()

    def end(self) -> None:
        with self._reporting:
            self._report()

    def _report(self) -> None:
        self._reported = time.monotonic()
        if self.progress:
            self.progress(self.done, self.total)


def differing(
    files: dict[str, File],
    listed: dict[str, tuple[int, str]],
    trusted: Callable[[str, File, str], bool],
    problem: Callable[[str, File, str], str],
) -> dict[str, str]:
    """Problems of recorded files in a store, by name.

    `listed` has the size and tag of each object. Files of the right size are read by problem(name, file, tag), in
    threads, unless trusted(name, file, tag).
    """
    wrong: dict[str, str] = {}

    def check(name: str, file: File, tag: str) -> None:
        if text := problem(name, file, tag):
            wrong[name] = text

    work: list[Task] = []
    for name, file in files.items():
        size, tag = listed.get(name, (None, ""))
        if size is None:
            wrong[name] = "missing"
        elif size != file.size:
            wrong[name] = f"size {size}, not {file.size}"
        elif not trusted(name, file, tag):
            work.append(functools.partial(check, name, file, tag))
    work_through(work)
    return {name: wrong[name] for name in files if name in wrong}


Task = Callable[[], "Iterable[Task] | None"]


def work_through(tasks: Iterable[Task], threads: int = THREADS, stopped: threading.Event | None = None) -> None:
    """Run tasks in threads, the last one first. A task may return follow-up tasks, which run next.

    A file that has begun is therefore finished before another begins. After the first error, or Ctrl-C, no task begins.
    It sets `stopped`, which long tasks check, and is raised when the running tasks have ended.
    """
    stack, running = list(tasks), set[Future]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            while stack or running:
                while stack and len(running) < threads:
                    running.add(pool.submit(stack.pop()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    stack += future.result() or ()
        except BaseException:
            if stopped:
                stopped.set()
            raise
