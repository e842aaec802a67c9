"""Owners of this host's GPUs: a process tree takes as many as it needs, at once, and the kernel frees them at its end.

    with gpu_locks.taken("train of tiny-1122", say, stop, count=4) as hold:
        subprocess.Popen(command, pass_fds=hold.descriptors, env=os.environ | hold.environment)

A GPU is a file, <folder>/<its UUID>.lock, and belongs to the process that has locked it (flock). A lock lives as long
as a process that has the descriptor, and a killed process keeps nothing. The content of the file is for people: the
owner, and since when. A process takes all GPUs that it needs or none, and never holds one while it waits for another.
Each waiting process has a file in <folder>/queue, locked while it waits; conf/host/gpu_queue.py has the order. A reader
of the queue holds <folder>/turn.lock for that moment. The GPUs of a host are those that nvidia-smi lists and
CUDA_VISIBLE_DEVICES leaves; without one, nothing waits. HOST_GPUS_HELD in the environment means that a starter holds
them for this process.

FINETUNE_LOCKS names another folder: containers that share GPUs have to share it. Programs that take no GPUs here are
not covered: memory that they use is waited for, reported, and never freed by force.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from conf.host import gpu_queue, nvidia_smi
from conf.host.gpu_queue import Wish
from conf.host.nvidia_smi import listed, visible
from contract import ownership
from contract.amounts import clock
from contract.faults import Fault
from contract.ownership import try_lock
from contract.processes import suspended

HELD = "HOST_GPUS_HELD"
TRIED = 0.5  # seconds between tries
LOOKED = 0.01  # seconds between tries for the right to look, which others have for milliseconds
SAID = 60.0  # seconds between lines about the same wait
FREE = 1024  # MiB that an idle GPU may show as used
CLEARED_WITHIN = 30.0  # seconds; the memory of a process that was killed is there again after 1 to 10
UNCHANGED = 10.0  # memory that has not changed for so long belongs to somebody who stays


@dataclass(frozen=True)
class Hold:
    """GPUs that this process has until it closes the hold.

    Processes that were passed the descriptors have them as well.
    """

    gpus: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()
    devices: str = ""  # as CUDA_VISIBLE_DEVICES names them

    @property
    def environment(self) -> dict[str, str]:
        if not self.gpus:
            return {}
        return {HELD: ",".join(self.gpus), "CUDA_VISIBLE_DEVICES": self.devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class Owner:
    """The note of a GPU's owner."""

    what: str
    since: float


@contextlib.contextmanager
def taken(
    what: str,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    gpus: tuple[str, ...] | None = None,
    count: int | None = None,
    flow: str = "",
    rank: int = 0,
) -> Iterator[Hold | None]:
    """Wait until so many of these GPUs are free (default: all visible ones), with their memory, and take them.

    The result is None if stop() came first. Others see the text `what` while they wait for this process. Wishes of
    one `flow` are served by rank.
    """
    hold = take(what, say, stop, gpus, count, flow, rank)
    try:
        yield hold
    finally:
        if hold:
            hold.close()


def take(
    what: str,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    gpus: tuple[str, ...] | None = None,
    count: int | None = None,
    flow: str = "",
    rank: int = 0,
) -> Hold | None:
    """Do the same as `taken`, but keep the GPUs until this process ends or closes the hold."""
    there = listed()
    gpus = visible(there) if gpus is None else gpus
    count = len(gpus) if count is None else count
    if not gpus or not count or HELD in os.environ:
        return Hold()
    if count > len(gpus):
        left = f"CUDA_VISIBLE_DEVICES leaves {len(gpus)}" if len(gpus) < len(there) else f"this host has {len(gpus)}"
        raise Fault(f"{what} takes {count} GPUs, and {left}")
    queue, told, told_at, began = _Queue(), "", 0.0, time.monotonic()
    try:
        while not stop():
            found = queue.ask(Wish(what, gpus, count, 0, flow, rank, time.time(), os.getpid()), there)
            if isinstance(found, Hold):
                if told:
                    names = found.devices.replace(",", ", ")
                    say(f"{what} has GPU {names} of this host, after {clock(time.monotonic() - began)}")
                _clear(found, what, say, stop)
                return found
            key, reason = found
            if reason and (key != told or time.monotonic() - told_at > SAID):
                told, told_at = key, time.monotonic()
                say(f"{what} waits for {_amount(count)}: {reason}")
            time.sleep(TRIED)
        return None
    finally:
        queue.leave()


def held(gpus: tuple[str, ...]) -> str | None:
    """The present owner of one of these GPUs, as text for people; None where nobody has one."""
    return _said(_look(gpus)[0], gpus) or None


def wanted(gpus: tuple[str, ...]) -> str | None:
    """The present owner of one of these GPUs, or else those that wait for one; None if they are free."""
    owners, wishes = _look(gpus)
    waiting = [f"{one.what} waits for {_amount(one.count)} of them" for one in wishes if {*one.gpus} & {*gpus}]
    return _said(owners, gpus) or "; ".join(waiting) or None


def standing() -> list[str]:
    """The owners of this host's GPUs and those that wait for some, a line each."""
    there = listed()
    if not there or not folder().is_dir():
        return []
    (owners, wishes), lines = _look(there), []
    for owner in dict.fromkeys(owners.values()):
        names = nvidia_smi.devices(tuple(gpu for gpu in there if owners.get(gpu) == owner), there)
        lines.append(f"{owner.what} has had GPU {names.replace(',', ', ')} for {clock(time.time() - owner.since)}")
    for wish in wishes:
        lines.append(f"{wish.what} has waited for {_amount(wish.count)} for {clock(time.time() - wish.since)}")
    return lines


def _look(gpus: tuple[str, ...]) -> tuple[dict[str, Owner], list[Wish]]:
    """Owners of these GPUs, and all that wait, first served first; neither while somebody else looks for long."""
    with _turn() as turn:
        return (_owners(gpus), gpu_queue.in_order(_Queue().others())) if turn else ({}, [])


class _Queue:
    """This process's place among those that wait, once it has had to."""

    def __init__(self) -> None:
        self._path, self._descriptor, self._number = Path(), -1, 0

    def ask(self, wish: Wish, there: tuple[str, ...]) -> Hold | tuple[str, str]:
        """Return the GPUs if they are free and it is this wish's turn.

        Else return what it waits for, and the same as text; both are empty while others are looking.
        """
        with _turn() as turn:
            if not turn:
                return "", ""
            others = self.others()
            mine = replace(wish, number=self._number or 1 + max((one.number for one in others), default=0))
            wanted = dict.fromkeys(gpu for one in (*others, mine) for gpu in one.gpus)
            owners = _owners(tuple(wanted))
            free = [gpu for gpu in wanted if gpu not in owners]
            chosen = gpu_queue.given([*others, mine], free, there).get(mine.number)
            if chosen and (descriptors := _lock(chosen)):
                _note(descriptors, wish.what)
                self.leave()
                return Hold(chosen, descriptors, nvidia_smi.devices(chosen, there))
            self._enter(mine)
            line = gpu_queue.in_order([*others, mine])
            ahead = [one for one in line[: line.index(mine)] if {*one.gpus} & {*mine.gpus}]
            reason = _said({gpu: owners[gpu] for gpu in mine.gpus if gpu in owners}, mine.gpus)
            before = [f"{one.what} waits for {_amount(one.count)} before it" for one in ahead]
            key = ", ".join([*(owner.what for owner in owners.values()), *(one.what for one in ahead)])
            return key, "; ".join(filter(None, [reason, *before]))

    def others(self) -> list[Wish]:
        """Wishes of those that wait. A file that nobody has locked is of one that is gone."""
        found = []
        for path in sorted((folder() / "queue").glob("*.json")):
            if path == self._path:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if not try_lock(descriptor):
                    found += _wish(path, descriptor)
                else:
                    with contextlib.suppress(OSError):  # another account's, in a folder where each removes its own
                        path.unlink()
            finally:
                os.close(descriptor)
        return found

    def _enter(self, wish: Wish) -> None:
        if self._number:
            return
        self._number = wish.number
        with contextlib.suppress(OSError):  # a full disk: it waits without a place, and is served all the same
            path = folder() / "queue" / f"{wish.number:09d}-{secrets.token_hex(4)}.json"
            self._descriptor, self._path = _open(path), path
            ownership.lock(self._descriptor)
            os.pwrite(self._descriptor, json.dumps(asdict(wish)).encode(), 0)

    def leave(self) -> None:
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


@contextlib.contextmanager
def _turn() -> Iterator[bool]:
    """Have the right to look at all locks and to take some. The result is False where somebody else keeps it long."""
    try:
        descriptor = _open(folder() / "turn.lock")
    except OSError as error:
        needed = "it has to be a folder of this host that every account can write to"
        raise Fault(f"FINETUNE_LOCKS: {folder()}: {error.strerror}; {needed}") from None
    until = time.monotonic() + 2 * TRIED
    try:
        while not try_lock(descriptor):
            if time.monotonic() > until:
                yield False
                return
            time.sleep(LOOKED)
        try:
            yield True
        finally:
            ownership.unlock(descriptor)  # also if a process that was forked just now has it too
    finally:
        os.close(descriptor)


def _owners(gpus: tuple[str, ...]) -> dict[str, Owner]:
    """Owners of those of these GPUs that somebody has."""
    found = {}
    for gpu in gpus:
        descriptor = _open(folder() / f"{gpu}.lock")
        if not try_lock(descriptor):
            found[gpu] = _read(descriptor)
        os.close(descriptor)
    return found


def _lock(gpus: tuple[str, ...]) -> tuple[int, ...]:
    """Lock all of these GPUs; the result is empty where somebody has one."""
    descriptors: list[int] = []
    try:
        for gpu in gpus:
            descriptors.append(_open(folder() / f"{gpu}.lock"))
            if not try_lock(descriptors[-1]):
                Hold(gpus, tuple(descriptors)).close()
                return ()
    except BaseException:
        Hold(gpus, tuple(descriptors)).close()
        raise
    return tuple(descriptors)


def folder() -> Path:
    if named := os.environ.get("FINETUNE_LOCKS"):
        return Path(named)
    shared = Path("/run/lock")  # gone with a restart of the host, and on a separate file system
    place = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return place / "finetune-gpus"


def _open(path: Path) -> int:
    """Open a file of the folder, writable for every account of this host.

    In a folder that all may write to, Linux lets nobody create a file anew that belongs to somebody else.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    for place in (folder(), path.parent):
        if not place.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # somebody else was faster
                place.chmod(0o1777)
    try:
        made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.fchmod(made, 0o666)
    return made


def _note(descriptors: tuple[int, ...], what: str) -> None:
    text = json.dumps({"what": what, "pid": os.getpid(), "since": time.time()}).encode()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # a full disk keeps nobody from the GPU
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)


def _read(descriptor: int) -> Owner:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return Owner(str(found["what"]), float(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):  # half written
        return Owner("another process", time.time())


def _wish(path: Path, descriptor: int) -> list[Wish]:
    """The wish in this file; None if it could not be written, or if its process is suspended."""
    try:
        found = json.loads(os.pread(descriptor, 1 << 16, 0))
        number, rank, since = int(path.name.partition("-")[0]), int(found["rank"]), float(found["since"])
        gpus, count = tuple(map(str, found["gpus"])), int(found["count"])
        wish = Wish(str(found["what"]), gpus, count, number, str(found["flow"]), rank, since, int(found["pid"]))
        return [] if suspended(wish.pid) else [wish]  # nobody waits for who does not look
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _said(owners: dict[str, Owner], gpus: tuple[str, ...]) -> str:
    """The owners of some of these GPUs, as text for people."""
    said = []
    for owner in dict.fromkeys(owners.values()):
        count = sum(one == owner for one in owners.values())
        them = f"{count} of {len(gpus)}" if count < len(gpus) else "it" if count == 1 else "them"
        said.append(f"{owner.what} has had {them} for {clock(time.time() - owner.since)}")
    return "; ".join(said)


def _amount(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _clear(hold: Hold, what: str, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Wait until the memory of the previous owner is free. A driver frees it some time after a process has died."""
    began = changed = time.monotonic()
    before, told = nvidia_smi.used(hold.gpus), False
    while before > FREE and not stop():
        now = time.monotonic()
        if now - changed > UNCHANGED or now - began > CLEARED_WITHIN:
            users = nvidia_smi.users(hold.gpus)
            say(f"{what} begins although {before / 1024:.1f} GiB of its GPUs are in use by others: {users}")
            return
        if not told:
            told = True
            say(f"{what} waits for the memory of its GPUs: {before / 1024:.1f} GiB are not free yet")
        time.sleep(TRIED)
        after = nvidia_smi.used(hold.gpus)
        if after != before:
            before, changed = after, time.monotonic()
