"""Ownership of each folder that a command writes: a second start is refused before it deletes or writes anything.

The owner keeps a file in the folder, or beside one that is replaced as a whole: .owner.N says which process of which
host it is, and since when. The owner touches it every RENEWED seconds, and removes it when it ends. Whoever finds one
asks this host whether that process lives. Of a process on another host it watches the file: one that is touched has an
owner, one that stays as it is for EXPIRES seconds has lost its own. No clock is compared with another host's. The next
owner creates .owner.N+1, which only one can; the highest number counts.

This is not done with flock: NFS without a lock daemon, and Lustre mounted with localflock, grant one lock to every
host, without a word; and a lock does not say whose it is. Exclusive creation is decided by the file server.

A command of a flow (GUARD_PID) waits for an owner on its own host that may be what a killed flow has left: its guard
(tasks/run/guard.py) gives that the run's gang.grace to save what it has. By hand, a second start is refused at once.

All ranks of a run share its folder. The process that starts them owns it; where torchrun or a gang has started them,
rank 0 does. The next attempt of a gang takes over at once, because its controller has seen to the end of the last one.

Not covered: a storage that is away for EXPIRES seconds from the owner's host alone, until that host sees it again.
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
EXPIRES = 60.0  # longer than NFS keeps what it knows of a file, and than an import holds the interpreter
POLLED = 1.0
OWNED = "TRAINER_OWNED"  # in the environment of ranks whose starter owns the folder
GUARDED = "GUARD_PID"  # in the environment of what a flow has started (tasks/run/guard.py)
LEAVES = 5.0  # seconds after gang.grace in which a guard has killed what is left
REPLACED = ("base", "data", "export")  # as a whole, so that their owner's file lies beside them


@contextlib.contextmanager
def hold(run: Run, key: str) -> Iterator[None]:
    """Own the folder paths.<key> until the block ends. Raises a Fault that names another owner."""
    if OWNED in os.environ or os.environ.get("RANK", "0") != "0":
        yield
        return
    if (taken := _try_to_take(run, key)) is None:
        yield  # nobody can write there, this command neither: it says so if it has to
        return
    place, mine, created = taken
    over = threading.Event()
    renewal = threading.Thread(target=_renew, args=(place, mine, over), daemon=True, name="ownership")
    renewal.start()
    try:
        yield
    finally:
        over.set()
        renewal.join()
        with contextlib.suppress(OSError):
            mine.unlink()
            for folder in created:
                folder.rmdir()  # an empty one that this command has not needed


def _try_to_take(run: Run, key: str) -> tuple[Path, Path, list[Path]] | None:
    """The owner's file without and with its number, and the folders made for it; None where nothing can be written."""
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
    """Path of the owner's file, without its number. It is the same for all names of the folder."""
    folder = folder.resolve()
    if key in REPLACED and folder.name:
        return folder.with_name(f".{folder.name}.owner")
    return folder / ".owner"


def _make_folder(folder: Path) -> list[Path]:
    """Make the folder. Returns the folders that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _take(place: Path, key: str, me: dict[str, Any], patience: float = 0.0) -> Path:
    while True:
        number, newest = _newest(place)
        if newest:
            _wait_for_end(newest, key, place, me, patience)
        mine = place.with_name(f"{place.name}.{number + 1}")
        with contextlib.suppress(FileExistsError):  # somebody else was faster: look again
            _create(mine, me)
            if _newest(place)[1] == mine:
                for older in _files(place).values():
                    if older != mine:
                        older.unlink(missing_ok=True)
                return mine
            mine.unlink()


def _wait_for_end(newest: Path, key: str, place: Path, me: dict[str, Any], patience: float) -> None:
    """Wait until that owner is seen to be gone. Raises a Fault once it is seen to live, here for so many seconds."""
    seen, until, told = _touched(newest), time.monotonic() + EXPIRES, False
    while seen is not None and time.monotonic() < until:
        owner = _read(newest)
        if owner.get("boot") == me["boot"]:
            _wait_for_process(owner, key, place, patience)
            return
        if _is_earlier_attempt(owner.get("attempt", ""), me["attempt"]):
            return
        if not told:
            say(f"paths.{key}: {_name(owner)} has had it; watches for {EXPIRES:.0f} s at most whether that still lives")
            told = True
        time.sleep(POLLED)
        now = _touched(newest)
        if now is not None and now != seen:
            raise Fault(_refusal(_read(newest) or owner, key, place))
        seen = now


def _wait_for_process(owner: dict[str, Any], key: str, place: Path, patience: float) -> None:
    """Wait until a process of this host has ended. Raises a Fault where it is still there after so many seconds."""
    until, told = time.monotonic() + patience, False
    while started(owner["pid"]) == owner["born"]:
        if time.monotonic() >= until:
            raise Fault(_refusal(owner, key, place))
        if not told:
            say(f"paths.{key}: waits for {_name(owner)}, which has it, for {patience:.0f} s at most")
            told = True
        time.sleep(min(POLLED, max(0.0, until - time.monotonic())))


def _refusal(owner: dict[str, Any], key: str, place: Path) -> str:
    folder = place.parent if place.name == ".owner" else place.with_name(place.name[1 : -len(".owner")])
    return (
        f"paths.{key}: {folder}: {_name(owner)} writes it since {owner.get('since', 'an unknown time')}; "
        f"end that or wait for it, or name another paths.{key}"
    )


def _name(owner: dict[str, Any]) -> str:
    command, pid, host = (owner.get(part, "unknown") for part in ("command", "pid", "host"))
    return f"{command} (process {pid} on {host})"


def _is_earlier_attempt(theirs: str, mine: str) -> bool:
    """Whether theirs is an earlier attempt of the same gang. Both are <gang>-<number>."""
    (gang, _, earlier), (mine_of, _, later) = theirs.rpartition("-"), mine.rpartition("-")
    return bool(gang) and gang == mine_of and earlier.isdigit() and later.isdigit() and int(earlier) < int(later)


def _renew(place: Path, mine: Path, over: threading.Event) -> None:
    while not over.wait(RENEWED):
        with contextlib.suppress(OSError):  # the storage is away; it may come back
            newest = _newest(place)[1]
            if newest and newest != mine:
                owner = _name(_read(newest))
                print(f"error: {mine.parent}: taken over by {owner}; this one was silent too long", file=sys.stderr)
                os._exit(1)  # and with it all ranks that it has started, before they write
            if newest is None:
                _create(mine, _myself())  # somebody has tidied up
            os.utime(mine)


def _files(place: Path) -> dict[int, Path]:
    prefix = f"{place.name}."
    found = (path for path in place.parent.iterdir() if path.name.startswith(prefix))
    return {int(path.name[len(prefix) :]): path for path in found if path.name[len(prefix) :].isdigit()}


def _newest(place: Path) -> tuple[int, Path | None]:
    return max(_files(place).items(), default=(0, None))


def _create(path: Path, content: dict[str, Any]) -> None:
    with path.open("x") as file:
        file.write(json.dumps(content))


def _read(path: Path) -> dict[str, Any]:
    """Content of an owner's file; empty where it is damaged, or just being written."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and {"boot", "pid", "born"} <= {*content}:
            return content
    return {}


def _touched(path: Path) -> int | None:
    """Time of the last touch; None where the file is gone. Opening it first makes a client of NFS ask its server."""
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
