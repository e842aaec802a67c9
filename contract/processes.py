"""Identity of a process: its number and start time tell it from a later process of the same number."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

from pathlib import Path


def started(pid: int) -> str | None:
    """The time at which a process was started, in clock ticks since boot; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
