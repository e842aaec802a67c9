"""Identity of a process (its number and start time), its state, its control groups, and its end with its parent."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def started(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot; None if the process does not exist."""
    fields = _stat(pid)
    return None if not fields or fields[0] == "Z" else fields[19]


def state(pid: int) -> str:
    """Return the state of a process from /proc: R, S, D, T, Z and others; empty if the process does not exist."""
    return next(iter(_stat(pid)), "")


def suspended(pid: int) -> bool:
    """Whether the process is stopped, for example by Ctrl-Z."""
    return state(pid) in ("T", "t")


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends for any reason.

    End at once if the parent, given by its number, has ended before.
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def memory_files(name: str, name_in_version_1: str, root: Path = Path("/")) -> Iterator[list[Path]]:
    """Files of this process's control groups that limit or count memory: those of the group and of all above it."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            group, file = root / "sys/fs/cgroup" / path.strip("/"), name
        elif "memory" in controllers.split(","):
            group, file = root / "sys/fs/cgroup/memory" / path.strip("/"), name_in_version_1
        else:
            continue
        yield [folder / file for folder in (group, *group.parents) if (folder / file).is_file()]


def _stat(pid: int) -> list[str]:
    """Return the fields of a process in /proc, beginning with its state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
