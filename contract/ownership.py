"""Ownership of each folder that a command writes: a second start is refused before it deletes or writes anything.

The owner has a file .owner.N in the folder, or next to a folder that is replaced as a whole. It names the process, the
host and the time of the start. The owner touches it every RENEWED seconds, and removes it when it ends. Another process
that finds the file checks whether the owner still lives: on its own host by the process, on another host by the file. A
file that is touched has a living owner; if it does not change for EXPIRES seconds, its owner is dead. Clocks of two
hosts are never compared. The next owner creates .owner.N+1, which only one process can do; the highest number is valid.

flock is not used: NFS without a lock daemon, and Lustre mounted with localflock, grant the same lock to every host
without an error; and a lock does not name its owner. The file server decides an exclusive creation.

A command of a flow (GUARD_PID) waits for an owner on its own host, which may be a process of a killed flow: its guard
(tasks/run/guard.py) gives that process the run's gang.grace to save its state. A second start by hand is refused at
once.

All ranks of a run share its folder. The process that starts them owns it; if torchrun or a gang has started them, rank
0 does. The next attempt of a gang takes the folder at once, because its controller has ended the previous attempt.

Not covered: a storage that only the owner's host cannot reach for EXPIRES seconds. Until it is back, that host does not
see that another process has taken the folder.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from conf.schema.run import Run
from contract.faults import CANNOT_WRITE, Fault
from contract.processes import started
from trainer.startup.console import say

RENEWED = 5.0  # seconds between touches
EXPIRES = 60.0  # longer than NFS caches attributes of a file, and than an import holds the interpreter
POLLED = 1.0
OWNED = "TRAINER_OWNED"  # set for ranks if the process that starts them owns the folder
GUARDED = "GUARD_PID"  # set for processes that a flow has started (tasks/run/guard.py)
LEAVES = 5.0  # seconds after gang.grace until a guard has killed the remaining processes
REPLACED = ("base", "data", "export")  # as a whole: their owner's file is next to them


@contextlib.contextmanager
def hold(run: Run, key: str) -> Iterator[None]:
    """Own the folder paths.<key> until the block ends. Raises a Fault that names another owner."""
    if OWNED in os.environ or os.environ.get("RANK", "0") != "0":
        yield
        return
    if (ownership := _try_to_take(run, key)) is None:
        yield  # nobody can write there, nor can this command: it reports that when it writes
        return
    place, own, created = ownership
    over = threading.Event()
    renewal = threading.Thread(target=_renew, args=(place, own, over), daemon=True, name="ownership")
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


def _try_to_take(run: Run, key: str) -> tuple[Path, Path, list[Path]] | None:
    """The owner's file without and with number, and the folders created for it; None if nothing can be written."""
    folder = Path(getattr(run.paths, key))
    try:
        place = _place(folder, key)
        created = _make_folder(place.parent)
        patience = run.gang.grace + LEAVES if GUARDED in os.environ else 0.0
        return place, _take(place, key, _myself(), patience), created
    except OSError as error:
        if error.errno in CANNOT_WRITE:
            return None
        raise Fault(f"paths.{key}: {folder}: {error.strerror}") from None


def _place(folder: Path, key: str) -> Path:
    """Path of the owner's file without its number. Links to the folder lead to the same path."""
    folder = folder.resolve()
    if key in REPLACED and folder.name:
        return folder.with_name(f".{folder.name}.owner")
    return folder / ".owner"


def _make_folder(folder: Path) -> list[Path]:
    """Create the folder. Returns the folders that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _take(place: Path, key: str, me: dict[str, Any], patience: float = 0.0) -> Path:
    while True:
        number, newest = _newest(place)
        if newest:
            _wait_for_end(newest, key, place, me, patience)
        own = place.with_name(f"{place.name}.{number + 1}")
        with contextlib.suppress(FileExistsError):  # another process was faster: look again
            _create(own, me)
            if _newest(place)[1] == own:
                for older in _files(place).values():
                    if older != own:
                        older.unlink(missing_ok=True)
                return own
            own.unlink()


def _wait_for_end(newest: Path, key: str, place: Path, me: dict[str, Any], patience: float) -> None:
    """Wait until that owner has ended. Raises a Fault if it lives; if it is on this host, after `patience` seconds."""
    touched, until, reported = _touched(newest), time.monotonic() + EXPIRES, False
    while touched is not None and time.monotonic() < until:
        owner = _read(newest)
        if owner.get("boot") == me["boot"]:
            _wait_for_process(owner, key, place, patience)
            return
        if _is_earlier_attempt(owner.get("attempt", ""), me["attempt"]):
            return
        if not reported:
            say(f"paths.{key}: owned by {_name(owner)}; checking for at most {EXPIRES:.0f} s whether that still runs")
            reported = True
        time.sleep(POLLED)
        now = _touched(newest)
        if now is not None and now != touched:
            raise Fault(_refusal(_read(newest) or owner, key, place))
        touched = now


def _wait_for_process(owner: dict[str, Any], key: str, place: Path, patience: float) -> None:
    """Wait until a process of this host has ended. Raises a Fault if it still runs after `patience` seconds."""
    until, reported = time.monotonic() + patience, False
    while started(owner["pid"]) == owner["born"]:
        if time.monotonic() >= until:
            raise Fault(_refusal(owner, key, place))
        if not reported:
            say(f"paths.{key}: waiting at most {patience:.0f} s for {_name(owner)}, which owns it")
            reported = True
        time.sleep(min(POLLED, max(0.0, until - time.monotonic())))


def _refusal(owner: dict[str, Any], key: str, place: Path) -> str:
    folder = place.parent if place.name == ".owner" else place.with_name(place.name[1 : -len(".owner")])
    return (
        f"paths.{key}: {folder}: {_name(owner)} has owned it since {owner.get('since', 'an unknown time')}; "
        f"end that process or wait for it, or name another paths.{key}"
    )


def _name(owner: dict[str, Any]) -> str:
    command, pid, host = (owner.get(part, "unknown") for part in ("command", "pid", "host"))
    return f"{command} (process {pid} on {host})"


def _is_earlier_attempt(other: str, own: str) -> bool:
    """Whether `other` is an earlier attempt of the same gang. Both are <gang>-<number>."""
    (gang, _, earlier), (own_gang, _, later) = other.rpartition("-"), own.rpartition("-")
    return bool(gang) and gang == own_gang and earlier.isdigit() and later.isdigit() and int(earlier) < int(later)


def _renew(place: Path, own: Path, over: threading.Event) -> None:
    while not over.wait(RENEWED):
        with contextlib.suppress(OSError):  # the storage cannot be reached; it may come back
            newest = _newest(place)[1]
            if newest and newest != own:
                owner = _name(_read(newest))
                reason = f"taken over by {owner}, because this process did not renew its file"
                print(f"error: {own.parent}: {reason}", file=sys.stderr)
                os._exit(1)  # which also ends all ranks that it has started, before they write
            if newest is None:
                _create(own, _myself())  # somebody has deleted the file
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
    """Content of an owner's file; empty if it is damaged, or just being written."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and {"boot", "pid", "born"} <= {*content}:
            return content
    return {}


def _touched(path: Path) -> int | None:
    """Time of the last touch; None if the file does not exist. An NFS client asks its server when a file is opened."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _myself() -> dict[str, Any]:
    spec, pid = sys.modules["__main__"].__spec__, os.getpid()
    return {
        "command": spec.name if spec else Path(sys.argv[0]).name,
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid"),
        "pid": pid,
        "born": started(pid),
        "attempt": os.environ.get("GANG_ATTEMPT", ""),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
    }
