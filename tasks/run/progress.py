"""Progress of a long stage as a Prefect progress artifact: percent, amounts, time left.

Only progress bars need Prefect. newest() works without it, for the command of a gang's controller.
"""

import contextlib
import json
import threading
import time
from pathlib import Path

from contract.amounts import clock, size
from contract.files import last_lines
from tasks.run.task_artifact import TaskArtifact

SHOWN_AFTER = 2.0  # seconds: shorter work gets no bar
EVERY = 2.0


class Progress:
    """A progress bar. update() may be called from any thread. Errors of the server are ignored."""

    def __init__(self, key: str, unit: str):
        self.artifact, self.unit = TaskArtifact(key, "progress"), unit
        self.began = self.sent_at = self.done = 0.0  # `done` is the amount that was sent last
        self.at_start: float | None = None  # amount that a killed attempt has done
        self.first: tuple[float, float] | None = None  # first progress and its time, after which the rate is measured
        self.lock = threading.Lock()

    def update(self, done: float, total: float) -> None:
        now = time.monotonic()
        with self.lock:
            if self.at_start is None:
                self.at_start, self.began = done, now
            if self.first is None and done > self.at_start:
                self.first = done, now
            last = done >= total > self.done and self.artifact.is_sent
            if not self.artifact.has_task or not total or now - self.began < SHOWN_AFTER:
                return
            if now - self.sent_at < EVERY and not last:
                return
            self.sent_at, self.done = now, done
            with contextlib.suppress(Exception):  # a failed bar must not end the stage
                self.artifact.send(100 * done / total, self._describe(done, total, now))

    def _describe(self, done: float, total: float, now: float) -> str:
        first, since = self.first or (done, now)
        rate = (done - first) / (now - since) if done > first else 0.0
        left = f", {clock((total - done) / rate)} left" if rate > 0 and done < total else ""
        if self.unit == "bytes":
            return f"{size(done)} of {size(total)}, {size(rate)}/s{left}"
        return f"{done:.0f} of {total:.0f} {self.unit}{left}"


def newest(file: Path, *keys: str) -> tuple[float, ...]:
    """Return the values of these keys in the last JSON line that has them; zeros without such a line."""
    for line in reversed(last_lines(file, 4096)):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line, or one of another kind
            values = json.loads(line)
            return tuple(values[key] for key in keys)
    return (0,) * len(keys)
