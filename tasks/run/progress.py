"""Progress of a long stage as a Prefect progress artifact: percent, amounts, time left.

Only bars need Prefect. A gang's controller by itself reads the newest figures without it.
"""

import contextlib
import json
import threading
import time
from pathlib import Path

from contract.amounts import clock, size
from tasks.run.task_artifact import TaskArtifact

SHOWN_AFTER = 2.0  # seconds: what ends sooner needs no bar
EVERY = 2.0


class Progress:
    """A progress bar that update() moves.

    It may be called from any thread, and never waits for a server that is away.
    """

    def __init__(self, key: str, unit: str):
        self.artifact, self.unit = TaskArtifact(key, "progress"), unit
        self.began = self.told = self.done = 0.0  # `done` is the amount that was sent last
        self.there: float | None = None  # at the start: a killed attempt is gone on with
        self.first: tuple[float, float] | None = (
            None  # first amount beyond that, and when: what is slow at first is over
        )
        self.lock = threading.Lock()

    def update(self, done: float, total: float) -> None:
        now = time.monotonic()
        with self.lock:
            if self.there is None:
                self.there, self.began = done, now
            if self.first is None and done > self.there:
                self.first = done, now
            last = done >= total > self.done and self.artifact.is_sent
            if not self.artifact.has_task or not total or now - self.began < SHOWN_AFTER:
                return
            if now - self.told < EVERY and not last:
                return
            self.told, self.done = now, done
            self._tell(100 * done / total, self._describe(done, total, now))

    def _describe(self, done: float, total: float, now: float) -> str:
        first, since = self.first or (done, now)
        rate = (done - first) / (now - since) if done > first else 0.0
        left = f", {clock((total - done) / rate)} left" if rate > 0 and done < total else ""
        if self.unit == "bytes":
            return f"{size(done)} of {size(total)}, {size(rate)}/s{left}"
        return f"{done:.0f} of {total:.0f} {self.unit}{left}"

    def _tell(self, percent: float, text: str) -> None:
        with contextlib.suppress(Exception):  # a bar is not worth a stage
            self.artifact.send(percent, text)


def newest(file: Path, *keys: str) -> tuple[float, ...]:
    """Values of the last line with these keys in a growing file of JSON lines; zeros before there is one."""
    try:
        with file.open("rb") as lines:
            lines.seek(max(0, file.stat().st_size - 4096))
            tail = lines.read().splitlines()
    except OSError:
        tail = []
    for line in reversed(tail):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # half written, or of another kind
            found = json.loads(line)
            return tuple(found[key] for key in keys)
    return (0,) * len(keys)
