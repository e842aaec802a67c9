"""Owners of folders and files. A folder or file is free again after its owner's process has died.

    hold(folder, label, ...)    own a folder of shared storage: a second start is refused before it writes anything
    locked(path)                own a file of this host: the kernel unlocks it when its process ends
    held(path, flags)           the same without waiting, also for a folder
    me(), ended(owner)          identity of this process, and whether that of another owner has ended

The owner of a folder has a file .owner.N in the folder, or next to a folder that is replaced as a whole. It names the
process, the host and the time of the start. The owner touches it every RENEWED seconds, and removes it when it ends.
Another process that finds the file checks whether the owner still lives: on its own host by the process, on another
host by the file. A file that is touched has a living owner; if it does not change for EXPIRES seconds, its owner is
dead. Clocks of two hosts are never compared. The next owner creates .owner.N+1, which only one process can do; the
highest number is valid.

flock is not used for this: NFS without a lock daemon, and Lustre mounted with localflock, grant the same lock to every
host without an error; and a lock does not name its owner. The file server decides an exclusive creation.

`patience` is how long to wait for an owner on this host, which may be a process of a killed flow that still saves its
state. The next attempt of a gang takes the folder at once, because its controller has ended the previous attempt.

Not covered: a storage that only the owner's host cannot reach for EXPIRES seconds. Until it is back, that host does not
see that another process has taken the folder.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from contract.faults import CANNOT_WRITE, Fault
from contract.processes import started

RENEWED = 5.0  # seconds between touches
EXPIRES = 60.0  # longer than NFS caches attributes of a file, and than an import holds the interpreter
POLLED = 1.0


def me(**more: Any) -> dict[str, Any]:
    """Return the identity of this process, which is unique over all hosts."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": boot(), "pid": pid, "started": started(pid), **more}


def boot() -> str:
    """Identity of this start of this machine. The process namespace distinguishes containers that share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def ended(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this host that has ended."""
    return owner.get("boot") == boot() and started(owner["pid"]) != owner["started"]


def name(owner: dict[str, Any]) -> str:
    """Return the owner as text for people."""
    pid, host = owner.get("pid", "unknown"), owner.get("host", "an unknown host")
    return f"{owner.get('about') or 'a process'} (process {pid} on {host})"


def decode(data: str | bytes) -> dict[str, Any]:
    """Return an owner from JSON; empty if the text is damaged, or just being written."""
    with contextlib.suppress(ValueError):
        owner = json.loads(data)
        if isinstance(owner, dict) and {"boot", "pid", "started"} <= {*owner}:
            return owner
    return {}


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Lock an open file now, if no other process has it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of this file, which is created if it is missing, and hold it."""
    with path.open("ab") as file:
        lock(file.fileno())
        yield


@contextlib.contextmanager
def held(path: Path, flags: int) -> Iterator[None]:
    """Hold the lock of a file or folder of this host, opened with these flags.

    Raises a BlockingIOError if another process holds it, or another OSError if it was removed before it was locked.
    """
    descriptor = os.open(path, flags)
    try:
        if not try_lock(descriptor):
            raise BlockingIOError
        os.stat(path)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold(
    folder: Path, label: str, replaced: bool, attempt: str, patience: float, report: Callable[[str], None]
) -> Iterator[None]:
    """Own the folder until the block ends. Raise a Fault that begins with `label` and names another owner.

    `replaced` says that the folder is replaced as a whole. `attempt` is <gang>-<number>, or empty.
    """
    place, created, own = _place(folder, replaced), [], None
    spec = sys.modules["__main__"].__spec__
    about = spec.name if spec else Path(sys.argv[0]).name
    owner = me(about=about, attempt=attempt, since=datetime.now().astimezone().isoformat(" ", "seconds"))
    try:
        created = _make_folder(place.parent)
        own = _take(place, label, owner, patience, report)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise Fault(f"{label}: {folder}: {error.strerror}") from None
    if own is None:
        yield  # read-only, also for this command, which reports that when it writes
        return
    over = threading.Event()
    renewal = threading.Thread(target=_renew, args=(place, own, owner, over), daemon=True, name="ownership")
    renewal.start()
    try:
        yield
    finally:
        over.set()
        renewal.join()
        with contextlib.suppress(OSError):
            own.unlink()
            for folder in created:
                folder.rmdir()  # succeeds only if the command has written nothing there


def _place(folder: Path, replaced: bool) -> Path:
    """Path of the owner's file without its number. Links to the folder lead to the same path."""
    folder = folder.resolve()
    if replaced and folder.name:
        return folder.with_name(f".{folder.name}.owner")
    return folder / ".owner"


def _make_folder(folder: Path) -> list[Path]:
    """Create the folder. Returns the folders that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _take(place: Path, label: str, owner: dict[str, Any], patience: float, report: Callable[[str], None]) -> Path:
    while True:
        number, newest = _newest(place)
        if newest:
            _wait_for_end(newest, label, place, owner, patience, report)
        own = place.with_name(f"{place.name}.{number + 1}")
        with contextlib.suppress(FileExistsError):  # another process was faster: look again
            _create(own, owner)
            if _newest(place)[1] == own:
                for older in _files(place).values():
                    if older != own:
                        older.unlink(missing_ok=True)
                return own
            own.unlink()


def _wait_for_end(
    newest: Path, label: str, place: Path, mine: dict[str, Any], patience: float, report: Callable[[str], None]
) -> None:
    """Wait until that owner has ended. Raise a Fault if it lives; on this host, only after `patience` seconds."""
    touched, until, reported = _touched(newest), time.monotonic() + EXPIRES, False
    while touched is not None and time.monotonic() < until:
        owner = _read(newest)
        if owner.get("boot") == mine["boot"]:
            _wait_for_process(owner, label, place, patience, report)
            return
        if _is_earlier_attempt(owner.get("attempt", ""), mine["attempt"]):
            return
        if not reported:
            report(f"{label}: owned by {name(owner)}; checking for at most {EXPIRES:.0f} s whether that still runs")
            reported = True
        time.sleep(POLLED)
        now = _touched(newest)
        if now is not None and now != touched:
            raise Fault(_refusal(_read(newest) or owner, label, place))
        touched = now


def _wait_for_process(
    owner: dict[str, Any], label: str, place: Path, patience: float, report: Callable[[str], None]
) -> None:
    """Wait until a process of this host has ended. Raise a Fault if it still runs after `patience` seconds."""
    until, reported = time.monotonic() + patience, False
    while not ended(owner):
        if time.monotonic() >= until:
            raise Fault(_refusal(owner, label, place))
        if not reported:
            report(f"{label}: waiting at most {patience:.0f} s for {name(owner)}, which owns it")
            reported = True
        time.sleep(min(POLLED, max(0.0, until - time.monotonic())))


def _refusal(owner: dict[str, Any], label: str, place: Path) -> str:
    folder = place.parent if place.name == ".owner" else place.with_name(place.name[1 : -len(".owner")])
    return (
        f"{label}: {folder}: {name(owner)} has owned it since {owner.get('since', 'an unknown time')}; "
        f"end that process or wait for it, or name another {label}"
    )


def _is_earlier_attempt(other: str, own: str) -> bool:
    """Whether `other` is an earlier attempt of the same gang. Both are <gang>-<number>."""
    (gang, _, earlier), (own_gang, _, later) = other.rpartition("-"), own.rpartition("-")
    return bool(gang) and gang == own_gang and earlier.isdigit() and later.isdigit() and int(earlier) < int(later)


def _renew(place: Path, own: Path, owner: dict[str, Any], over: threading.Event) -> None:
    while not over.wait(RENEWED):
        with contextlib.suppress(OSError):  # the storage cannot be reached; it may come back
            newest = _newest(place)[1]
            if newest and newest != own:
                other = name(_read(newest))
                reason = f"taken over by {other}, because this process did not renew its file"
                print(f"error: {own.parent}: {reason}", file=sys.stderr)
                os._exit(1)  # this also ends all ranks that it has started, before they write
            if newest is None:
                _create(own, owner)  # another program has deleted the file
            os.utime(own)


def _files(place: Path) -> dict[int, Path]:
    prefix = f"{place.name}."
    paths = (path for path in place.parent.iterdir() if path.name.startswith(prefix))
    return {int(path.name[len(prefix) :]): path for path in paths if path.name[len(prefix) :].isdigit()}


def _newest(place: Path) -> tuple[int, Path | None]:
    return max(_files(place).items(), default=(0, None))


def _create(path: Path, content: dict[str, Any]) -> None:
    with path.open("x") as file:
        file.write(json.dumps(content))


def _read(path: Path) -> dict[str, Any]:
    try:
        return decode(path.read_bytes())
    except OSError:
        return {}


def _touched(path: Path) -> int | None:
    """Time of the last touch; None if the file does not exist. An NFS client asks its server when a file is opened."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
