"""Owners of this host's GPUs: a process tree takes all that it needs at once, and the kernel frees them when it ends.

    hold = gpu_locks.take("train of tiny-1122", say, stop, count=4)
    subprocess.Popen(command, pass_fds=hold.descriptors, env=os.environ | hold.environment)
    hold.close()

Each GPU has a file, <folder>/<UUID>.lock. The process that has locked the file (flock) owns the GPU. The lock lasts
until all processes with the descriptor have ended or closed it, so a killed process keeps nothing. The content of the
file is for people: the owner and the time. A process takes all GPUs that it needs or none, and never holds one while it
waits for another. Each waiting process has a file in <folder>/queue, locked while it waits; conf/host/gpu_queue.py has
the order. A process that reads the queue holds <folder>/turn.lock meanwhile. The GPUs of a host are those that
nvidia-smi lists and CUDA_VISIBLE_DEVICES allows; on a host without GPUs nothing waits. HOST_GPUS_HELD in the
environment means that the process that started this one holds the GPUs for it.

FINETUNE_LOCKS names another folder; containers that share GPUs must share it. Programs that do not use these locks are
not covered: a new owner waits a while for the memory that they use, reports it, and starts.
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
from conf.host.gpu_queue import Request
from conf.host.nvidia_smi import listed, visible
from contract import ownership
from contract.amounts import clock
from contract.faults import Fault
from contract.ownership import try_lock
from contract.processes import suspended

HELD = "HOST_GPUS_HELD"
TRIED = 0.5  # seconds between tries for the GPUs
LOOKED = 0.01  # seconds between tries for turn.lock, which others hold for milliseconds
SAID = 60.0  # seconds between lines about the same wait
FREE = 1024  # MiB that an idle GPU may show as used
CLEARED_WITHIN = 30.0  # seconds; the memory of a killed process is free after 1 to 10
UNCHANGED = 10.0  # seconds; memory that has not changed for so long belongs to a process that stays


@dataclass(frozen=True)
class Hold:
    """GPUs that this process owns until it closes the hold.

    Processes that inherited the descriptors own them too.
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


def take(
    what: str,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    gpus: tuple[str, ...] | None = None,
    count: int | None = None,
    flow: str = "",
    rank: int = 0,
) -> Hold | None:
    """Wait until `count` of these GPUs and their memory are free, and take them. The default is all visible GPUs.

    Return None if stop() became true first. Processes that wait for this one log the text `what`. Requests of one
    `flow` are served by rank. The GPUs are taken until this process ends or closes the hold.
    """
    host = listed()
    gpus = visible(host) if gpus is None else gpus
    count = len(gpus) if count is None else count
    if not gpus or not count or HELD in os.environ:
        return Hold()
    if count > len(gpus):
        left = f"CUDA_VISIBLE_DEVICES leaves {len(gpus)}" if len(gpus) < len(host) else f"this host has {len(gpus)}"
        raise Fault(f"{what} needs {count} GPUs, but {left}")
    queue, reported, reported_at, began = _Queue(), "", 0.0, time.monotonic()
    try:
        while not stop():
            result = queue.ask(Request(what, gpus, count, 0, flow, rank, time.time(), os.getpid()), host)
            if isinstance(result, Hold):
                if reported:
                    names = result.devices.replace(",", ", ")
                    say(f"{what} has GPU {names} of this host, after {clock(time.monotonic() - began)}")
                _clear(result, what, say, stop)
                return result
            key, reason = result
            if reason and (key != reported or time.monotonic() - reported_at > SAID):
                reported, reported_at = key, time.monotonic()
                say(f"{what} waits for {_amount(count)}: {reason}")
            time.sleep(TRIED)
        return None
    finally:
        queue.leave()


def claimed(gpus: tuple[str, ...]) -> str | None:
    """Return the present owners of these GPUs, or else the processes that wait for them; None if there are neither."""
    owners, requests = _look(gpus)
    waiting = [f"{each.what} waits for {_amount(each.count)} of them" for each in requests if {*each.gpus} & {*gpus}]
    return _said(owners, gpus) or "; ".join(waiting) or None


def standing() -> list[str]:
    """Return a line for each owner of this host's GPUs, and for each process that waits for some."""
    host = listed()
    if not host or not folder().is_dir():
        return []
    (owners, requests), lines = _look(host), []
    for owner in dict.fromkeys(owners.values()):
        names = nvidia_smi.devices(tuple(gpu for gpu in host if owners.get(gpu) == owner), host)
        lines.append(f"{owner.what} has held GPU {names.replace(',', ', ')} for {clock(time.time() - owner.since)}")
    for request in requests:
        lines.append(f"{request.what} has waited for {_amount(request.count)} for {clock(time.time() - request.since)}")
    return lines


def _look(gpus: tuple[str, ...]) -> tuple[dict[str, Request], list[Request]]:
    """Return the owners of these GPUs, and all requests in their order; nothing if turn.lock stays taken for long."""
    with _turn() as turn:
        return (_owners(gpus), gpu_queue.in_order(_Queue().others())) if turn else ({}, [])


class _Queue:
    """The place of this process in the queue. It gets one when it first has to wait."""

    def __init__(self) -> None:
        self._path, self._descriptor, self._number = Path(), -1, 0

    def ask(self, request: Request, host: tuple[str, ...]) -> Hold | tuple[str, str]:
        """Return the GPUs if they are free and it is this request's turn.

        Otherwise return the processes ahead of it, and a text about them. Both are empty if turn.lock stays taken.
        """
        with _turn() as turn:
            if not turn:
                return "", ""
            others = self.others()
            mine = replace(request, number=self._number or 1 + max((other.number for other in others), default=0))
            gpus = dict.fromkeys(gpu for waiting in (*others, mine) for gpu in waiting.gpus)
            owners = _owners(tuple(gpus))
            free = [gpu for gpu in gpus if gpu not in owners]
            chosen = gpu_queue.assigned([*others, mine], free, host).get(mine.number)
            if chosen and (descriptors := _lock(chosen)):
                _note(descriptors, request)
                self.leave()
                return Hold(chosen, descriptors, nvidia_smi.devices(chosen, host))
            self._enter(mine)
            line = gpu_queue.in_order([*others, mine])
            ahead = [other for other in line[: line.index(mine)] if {*other.gpus} & {*mine.gpus}]
            reason = _said({gpu: owners[gpu] for gpu in mine.gpus if gpu in owners}, mine.gpus)
            before = [f"{other.what} waits for {_amount(other.count)} before it" for other in ahead]
            key = ", ".join([*(owner.what for owner in owners.values()), *(other.what for other in ahead)])
            return key, "; ".join(filter(None, [reason, *before]))

    def others(self) -> list[Request]:
        """Return the requests of other waiting processes. A file without a lock belongs to a process that has ended."""
        requests = []
        for path in sorted((folder() / "queue").glob("*.json")):
            if path == self._path:
                continue
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                if not try_lock(descriptor):
                    request = _read(descriptor, path.name)
                    # a suspended process cannot take GPUs
                    requests += [request] if request and not suspended(request.pid) else []
                else:
                    with contextlib.suppress(OSError):  # another account's: only that one can remove it
                        path.unlink()
            finally:
                os.close(descriptor)
        return requests

    def _enter(self, request: Request) -> None:
        if self._number:
            return
        self._number = request.number
        with contextlib.suppress(OSError):  # a full disk: it waits without a place, but still gets GPUs
            path = folder() / "queue" / f"{request.number:09d}-{secrets.token_hex(4)}.json"
            self._descriptor, self._path = _open(path), path
            ownership.lock(self._descriptor)
            os.pwrite(self._descriptor, json.dumps(asdict(request)).encode(), 0)

    def leave(self) -> None:
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


@contextlib.contextmanager
def _turn() -> Iterator[bool]:
    """Hold turn.lock, to look at all locks and take some. Yield False if another process keeps it for long."""
    try:
        descriptor = _open(folder() / "turn.lock")
    except OSError as error:
        needed = "it must be a folder of this host that every account can write to"
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
            ownership.unlock(descriptor)  # even if a process that was just forked has the descriptor too
    finally:
        os.close(descriptor)


def _owners(gpus: tuple[str, ...]) -> dict[str, Request]:
    """Return the requests of the owners of these GPUs; free GPUs are absent."""
    owners = {}
    for gpu in gpus:
        descriptor = _open(folder() / f"{gpu}.lock")
        if not try_lock(descriptor):
            owners[gpu] = _read(descriptor) or Request("another process", (), 0, 0, since=time.time())
        os.close(descriptor)
    return owners


def _lock(gpus: tuple[str, ...]) -> tuple[int, ...]:
    """Lock all of these GPUs. Return nothing if another process has one of them."""
    descriptors: list[int] = []
    with contextlib.ExitStack() as opened:
        for gpu in gpus:
            descriptors.append(_open(folder() / f"{gpu}.lock"))
            opened.callback(os.close, descriptors[-1])
            if not try_lock(descriptors[-1]):
                return ()
        opened.pop_all()
    return tuple(descriptors)


def folder() -> Path:
    if named := os.environ.get("FINETUNE_LOCKS"):
        return Path(named)
    shared = Path("/run/lock")  # emptied by a restart of the host, and on a separate file system
    place = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return place / "finetune-gpus"


def _open(path: Path) -> int:
    """Open a file of the folder, writable for every account of this host.

    In a folder that all accounts can write to, Linux refuses O_CREAT on an existing file of another account.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    for place in (folder(), path.parent):
        if not place.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # another process was faster
                place.chmod(0o1777)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.fchmod(descriptor, 0o666)
    return descriptor


def _note(descriptors: tuple[int, ...], request: Request) -> None:
    """Write the request, from now on that of the owner, into the files of its GPUs."""
    text = json.dumps(asdict(replace(request, since=time.time()))).encode()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # a full disk does not prevent the use of the GPU
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)


def _read(descriptor: int, name: str = "0") -> Request | None:
    """Return the request in a file, whose name begins with its number; None if not all of it could be written."""
    try:
        entry = json.loads(os.pread(descriptor, 1 << 16, 0))
        number, rank, since = int(name.partition("-")[0]), int(entry["rank"]), float(entry["since"])
        gpus, count = tuple(map(str, entry["gpus"])), int(entry["count"])
        return Request(str(entry["what"]), gpus, count, number, str(entry["flow"]), rank, since, int(entry["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _said(owners: dict[str, Request], gpus: tuple[str, ...]) -> str:
    """Return the owners of some of these GPUs, as text for people."""
    lines = []
    for owner in dict.fromkeys(owners.values()):
        count = sum(other == owner for other in owners.values())
        them = f"{count} of {len(gpus)}" if count < len(gpus) else "it" if count == 1 else "them"
        lines.append(f"{owner.what} has held {them} for {clock(time.time() - owner.since)}")
    return "; ".join(lines)


def _amount(count: int) -> str:
    return f"{count} GPU{'s' * (count > 1)}"


def _clear(hold: Hold, what: str, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Wait until the memory of the previous owner is free. The driver frees it some time after the process ended."""
    began = changed = time.monotonic()
    before, reported = nvidia_smi.used(hold.gpus), False
    while before > FREE and not stop():
        now = time.monotonic()
        if now - changed > UNCHANGED or now - began > CLEARED_WITHIN:
            users = nvidia_smi.users(hold.gpus)
            say(f"{what} begins although {before / 1024:.1f} GiB of its GPUs are in use by others: {users}")
            return
        if not reported:
            reported = True
            say(f"{what} waits for the memory of its GPUs: {before / 1024:.1f} GiB are not free yet")
        time.sleep(TRIED)
        after = nvidia_smi.used(hold.gpus)
        if after != before:
            before, changed = after, time.monotonic()
