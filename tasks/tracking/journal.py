"""Journal of events on the disk, until the tracking services have accepted them: one folder per flow process.

    <runs>/tracking/<flow id>-<6 hex>/
        meta.json           services and experiment; no credentials
        events.jsonl        one event per line, flushed to the disk before append() returns
        files/              copies of the files in events
        cursor-<sink>.json  position of a service in events.jsonl, and its ids of our runs
        lock                held (flock) while the process lives: a journal whose lock is free is dead

The folder is removed when every service has accepted every event. Not covered: two hosts whose shared file system does
not propagate flock.
"""

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from contract import json_object
from contract.files import write_atomically
from contract.ownership import try_lock

log = logging.getLogger("finetune.tracking")

READ = 4 << 20  # bytes of events.jsonl at a time


class Journal:
    def __init__(self, folder: Path, lock: int):
        self.folder, self._lock = folder, lock
        self.meta: dict = json.loads((folder / "meta.json").read_text())
        self._events = os.open(folder / "events.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._mutex = threading.Lock()
        self._closed = self._torn = False
        self._readers = len(self.meta["sinks"])
        self.listeners: list[threading.Event] = []  # one per reader; set after each append
        self._end_half_a_line()

    def append(self, *events: dict) -> None:
        """Append events. On a full disk they are lost with a warning, and the training continues."""
        data = "".join(json.dumps(event) + "\n" for event in events).encode()
        with self._mutex:
            if self._closed:
                return
            data = b"\n" + data if self._torn else data
            try:
                while data:
                    data = data[os.write(self._events, data) :]
                    self._torn = bool(data)
                os.fdatasync(self._events)
            except OSError as error:
                self._torn = True
                log.warning("tracking: %s: %s; %d events are lost", self.folder, error.strerror, len(events))
        for listener in self.listeners:
            listener.set()

    def keep(self, content: bytes | Path, name: str) -> str:
        """Copy a file into the journal under its final name. Return the path inside the folder."""
        place = Path("files", secrets.token_hex(4), Path(name).name)
        path = self.folder / place
        path.parent.mkdir(parents=True)
        if isinstance(content, Path):
            shutil.copyfile(content, path)
        else:
            path.write_bytes(content)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return str(place)

    def read(self, offset: int) -> list[tuple[dict, int]]:
        """Return the events from this offset on, each with the offset after it. A damaged line is an empty event."""
        events = []
        data = os.pread(self._events, READ, offset)
        if len(data) == READ and b"\n" not in data:
            data = os.pread(self._events, self.size - offset, offset)
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            try:
                events.append((json.loads(line), offset))
            except ValueError:
                events.append(({}, offset))
        return events

    @property
    def size(self) -> int:
        return os.fstat(self._events).st_size

    def cursor(self, sink: str) -> dict:
        cursor = json_object.read_or_empty(self.folder / f"cursor-{sink}.json")
        return cursor or {"offset": 0, "runs": {}}  # start from the beginning: events may be sent twice

    def advance(self, sink: str, cursor: dict) -> None:
        write_atomically(self.folder / f"cursor-{sink}.json", json.dumps(cursor), durable=False)

    def waiting(self, sink: str) -> int:
        offset, count = self.cursor(sink)["offset"], 0
        while events := self.read(offset):
            offset, count = events[-1][1], count + len(events)
        return count

    def leave(self) -> None:
        """Record that one service has accepted everything. The last service releases the journal."""
        with self._mutex:
            self._readers -= 1
            last = self._readers == 0
        if last:
            self.release()

    def release(self, drop: bool = False) -> None:
        """Close the journal, and remove it if every service has everything, or with `drop`."""
        with self._mutex:
            self._closed = True
            if drop or all(self.cursor(sink)["offset"] >= self.size for sink in self.meta["sinks"]):
                shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._events)
            os.close(self._lock)

    def _end_half_a_line(self) -> None:
        if self.size and os.pread(self._events, 1, self.size - 1) != b"\n":
            os.write(self._events, b"\n")


def create(root: Path, id: str, meta: dict) -> Journal:
    root.mkdir(parents=True, exist_ok=True)
    name = f"{id}-{secrets.token_hex(3)}"
    folder = root / f".{name}"  # hidden from other processes until it is locked
    folder.mkdir()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try_lock(lock)
    (folder / "meta.json").write_text(json.dumps({"attempt": name, "created": time.time(), **meta}))
    return Journal(folder.rename(root / name), lock)


def others(root: Path) -> bool:
    """Return whether journals of any process exist, running or dead."""
    return any(root.glob("[!.]*/"))


def is_held(folder: Path) -> bool:
    """Return whether a process holds the journal. A process holds it until its last thread has ended."""
    try:
        os.close(_locked(folder))
    except BlockingIOError:
        return True
    except OSError:  # it was removed after shipping
        pass
    return False


def dead(root: Path) -> Iterator[Journal]:
    """Yield journals of dead processes, the oldest first. The caller holds each journal until it releases it."""
    for folder in sorted(root.glob("[!.]*/"), key=_created):
        try:
            lock = _locked(folder)
        except OSError:  # its process runs, or another process has just sent and removed it
            continue
        try:
            journal = Journal(folder, lock)
        except (OSError, ValueError):
            os.close(lock)
            continue
        yield journal


def _locked(folder: Path) -> int:
    """Take the lock of a journal. Raises BlockingIOError if another process holds it."""
    lock = os.open(folder / "lock", os.O_RDWR)
    if not try_lock(lock):
        os.close(lock)
        raise BlockingIOError
    return lock


def _created(folder: Path) -> float:
    return json_object.read_or_empty(folder / "meta.json").get("created", 0.0)
