"""Identity of a process, by its number and start time, its state, and its end with its parent's."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import ctypes
import signal
from pathlib import Path

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def started(pid: int) -> str | None:
    """The time at which a process was started, in clock ticks since boot; None where there is no such process."""
    fields = _stat(pid)
    return None if not fields or fields[0] == "Z" else fields[19]


def state(pid: int) -> str:
    """State of a process, as /proc has it: R, S, D, T, Z and others; empty where there is no such process."""
    return next(iter(_stat(pid)), "")


def suspended(pid: int) -> bool:
    """Whether somebody has stopped the process and not continued it, as Ctrl-Z does."""
    return state(pid) in ("T", "t")


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that is."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
