"""Locks on the GPUs of this host: one tree of processes has them at a time.

    with host_gpus.taken("train of tiny-1122", say, stop) as hold:
        subprocess.Popen(command, pass_fds=hold.descriptors, env=os.environ | hold.environment)

A GPU is a file, <folder>/<its UUID>.lock, and belongs to whoever has locked it (flock). A lock lives as long as a
process that has the descriptor. So a killed process keeps nothing, and no clock is asked. The content of the file is
for people: who has it, and since when. A process takes all the GPUs that it wants at once or none of them, so that
nobody waits for one while holding another. The GPUs of a host are those that nvidia-smi lists and CUDA_VISIBLE_DEVICES
leaves; where there are none, nothing is waited for. HOST_GPUS_HELD in the environment says that a starter holds them
for this process.

FINETUNE_LOCKS names another folder: containers that share GPUs have to share it. Not covered: the order of those that
wait, and programs that take no turns (the memory that they use is reported).
"""

import contextlib
import fcntl
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD = "HOST_GPUS_HELD"
TRIED = 0.5  # seconds between tries
SAID = 60.0  # seconds between lines about the same wait
FREE = 1024  # MiB that an idle GPU may show as used
CLEARED_WITHIN = 30.0  # seconds; the memory of a process that was killed is there again after 1 to 10
UNCHANGED = 10.0  # memory that has not changed for so long belongs to somebody who stays
ANSWERS_WITHIN = 60.0


@dataclass(frozen=True)
class Hold:
    """GPUs that this process has until it closes the hold.

    Processes that were passed the descriptors have them as well.
    """

    gpus: tuple[str, ...] = ()
    descriptors: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        return {HELD: ",".join(self.gpus)} if self.gpus else {}

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def listed() -> tuple[str, ...]:
    """UUIDs of this host's GPUs, in nvidia-smi's order."""
    return tuple(re.findall(r"^GPU \d+: .*\(UUID: ([\w-]+)\)", _nvidia_smi("-L"), re.MULTILINE))


def visible() -> tuple[str, ...]:
    """UUIDs of the GPUs that a process with this environment can use."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = listed()
    if wanted is None or not gpus:
        return gpus
    found: list[str] = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        if name.isdigit():
            found += gpus[int(name) : int(name) + 1]
        elif not name.startswith("-"):  # a UUID, or how it begins; that of a MIG instance is a GPU by itself
            found.append(next((gpu for gpu in gpus if gpu.startswith(name)), name))
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def taken(
    what: str,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    gpus: tuple[str, ...] | None = None,
) -> Iterator[Hold | None]:
    """Wait until nobody has these GPUs (default: all visible ones) nor uses their memory, and take them.

    The result is None where stop() came first. `what` is the text that others are told while they wait for this
    process.
    """
    hold = take(what, say, stop, gpus)
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
) -> Hold | None:
    """Do the same as `taken`, but keep the GPUs until this process ends or closes the hold."""
    gpus = visible() if gpus is None else gpus
    if not gpus or HELD in os.environ:
        return Hold()
    told, told_at, began = "", 0.0, time.monotonic()
    while not stop():
        descriptors = _try(gpus)
        if isinstance(descriptors, tuple):
            _note(descriptors, what)
            hold = Hold(gpus, descriptors)
            if told:
                say(f"{what} has the GPUs of this host, after {_minutes(time.monotonic() - began)}")
            _clear(hold, what, say, stop)
            return hold
        other = descriptors
        if other["what"] != told or time.monotonic() - told_at > SAID:
            told, told_at = other["what"], time.monotonic()
            say(f"{what} waits for the GPUs of this host, which {_owner(other)}")
        time.sleep(TRIED)
    return None


def held(gpus: tuple[str, ...]) -> str | None:
    """The present owner of one of these GPUs, as text for people; None where nobody has one."""
    found = _try(gpus)
    if isinstance(found, dict):
        return _owner(found)
    Hold(gpus, found).close()
    return None


def _try(gpus: tuple[str, ...]) -> tuple[int, ...] | dict:
    """Lock all of these GPUs and return the descriptors, or return the content of the file of one that somebody has."""
    descriptors: list[int] = []
    try:
        for gpu in sorted(gpus):
            descriptors.append(_open(gpu))
            fcntl.flock(descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _read(descriptors[-1])
        Hold(gpus, tuple(descriptors)).close()
        return owner
    except BaseException:
        Hold(gpus, tuple(descriptors)).close()
        raise
    return tuple(descriptors)


def folder() -> Path:
    if named := os.environ.get("FINETUNE_LOCKS"):
        return Path(named)
    shared = Path("/run/lock")  # gone with a restart of the host, and on a file system of its own
    place = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    return place / "finetune-gpus"


def _open(gpu: str) -> int:
    """Open the lock file of a GPU, writable for every account of this host.

    In a folder that all may write to, Linux lets nobody create a file anew that belongs to somebody else.
    """
    path = folder() / f"{gpu}.lock"
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # somebody else was faster
            path.parent.chmod(0o1777)
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


def _read(descriptor: int) -> dict:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return {"what": str(found["what"]), "since": float(found["since"])}
    except (OSError, ValueError, KeyError, TypeError):  # half written
        return {"what": "another process", "since": time.time()}


def _owner(other: dict) -> str:
    return f"{other['what']} has had for {_minutes(time.time() - other['since'])}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{max(0.0, seconds):.0f} s"


def _clear(hold: Hold, what: str, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Wait until the memory of the previous owner is free. A driver frees it some time after a process has died."""
    began = changed = time.monotonic()
    before, told = used(hold.gpus), False
    while before > FREE and not stop():
        now = time.monotonic()
        if now - changed > UNCHANGED or now - began > CLEARED_WITHIN:
            say(f"{what} begins although {before / 1024:.1f} GiB of its GPUs are in use by others: {_users()}")
            return
        if not told:
            told = True
            say(f"{what} waits for the memory of its GPUs: {before / 1024:.1f} GiB are not free yet")
        time.sleep(TRIED)
        after = used(hold.gpus)
        if after != before:
            before, changed = after, time.monotonic()


def used(gpus: tuple[str, ...]) -> int:
    """MiB in use on the fullest of these GPUs."""
    rows = _nvidia_smi("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits").splitlines()
    found = dict(re.findall(r"^([\w-]+), *(\d+)", "\n".join(rows), re.MULTILINE))
    return max((int(found[gpu]) for gpu in gpus if gpu in found), default=0)


def _users() -> str:
    rows = _nvidia_smi("--query-compute-apps=pid,process_name", "--format=csv,noheader").splitlines()
    return "; ".join(f"process {row.strip()}" for row in rows if row.strip()) or "nvidia-smi does not say whom"


def _nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi; nothing on a host without GPUs."""
    try:
        answer = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=ANSWERS_WITHIN)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
