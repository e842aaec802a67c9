"""Tells a process from a later one of the same number."""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

from pathlib import Path


def started(pid: int) -> str | None:
    """When a process was started, in clock ticks since boot; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
