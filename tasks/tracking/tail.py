"""Reader of a JSONL file that another process appends to, and may replace: metrics.jsonl of a training.

A training that resumes replaces the file with a shorter one and repeats some steps. Each step of each kind is returned
once. An incomplete line is returned when its end has been written.
"""

# pyright: reportArgumentType=false

import json
import os
from pathlib import Path
from typing import Any

import yaml

CHUNK = 8 << 20
NOT_METRICS = {"kind", "step", "time"}
METRICS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text())
NAMES, VALIDATION = METRICS["names"], METRICS["validation"]


class Tail:
    def __init__(self, path: Path):
        self.path = path
        self._file: int | None = None  # kept open, so that a file that replaces it has another inode
        self._offset = 0
        self._last: dict[str, int] = {}

    def lines(self) -> list[dict]:
        """Return new lines of the next CHUNK bytes; empty if there are none."""
        if self._moved():
            self.close()
            try:
                self._file, self._offset = os.open(self.path, os.O_RDONLY), 0
            except OSError:
                return []
        data = os.pread(self._file, CHUNK, self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for text in whole.splitlines() if (line := parse(text)) and self._is_new(line)]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _moved(self) -> bool:
        if self._file is None:
            return True
        try:
            path, file = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return False  # removed; another file may replace it
        return (path.st_dev, path.st_ino) != (file.st_dev, file.st_ino) or file.st_size < self._offset

    def _is_new(self, line: dict) -> bool:
        if line["step"] <= self._last.get(line["kind"], -1):
            return False
        self._last[line["kind"]] = line["step"]
        return True


def metrics(line: dict) -> list[list]:
    """Return the numbers of a line of a known kind, each as [key, value, milliseconds, step]."""
    if line["kind"] not in ("train", "validation", "start", "packing", "reinforce", "held_out"):
        return []
    at = round(float(line.get("time") or 0) * 1000)
    numbers = {key: value for key, value in line.items() if key not in NOT_METRICS and _is_number(value)}
    return [[_name(line["kind"], key), float(value), at, line["step"]] for key, value in numbers.items()]


def _name(kind: str, key: str) -> str:
    if kind in ("packing", "reinforce", "held_out"):
        return f"{kind}/{key}"
    if kind != "validation":
        return NAMES.get(key, f"other/{key}")
    return VALIDATION.get(key, f"other/validation_{key}")


def _is_number(value) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def parse(text: bytes) -> dict | None:
    """Return a line of metrics, or None if it is incomplete."""
    try:
        line = json.loads(text)
        return line if isinstance(line["kind"], str) and isinstance(line["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None
