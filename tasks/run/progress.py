"""Progress of a long stage as a Prefect progress artifact: percent, amounts, time left.

Only bars need Prefect. A gang's controller by itself reads the newest figures without it.
"""

# pyright: reportOptionalMemberAccess=false

import contextlib
import json
import threading
import time
from pathlib import Path
from typing import Any

from contract.amounts import clock, size

SHOWN_AFTER = 2.0  # seconds: what ends sooner needs no bar
EVERY = 2.0


class Progress:
    """A progress bar that update() moves.

    It may be called from any thread, and never waits for a server that is away.
    """

    def __init__(self, key: str, unit: str):
        from prefect.context import TaskRunContext

        context = TaskRunContext.get()
        self.task_run = context.task_run if context else None
        self.key, self.unit = key, unit
        self.began = self.told = 0.0
        self.there: float | None = None  # at the start: a killed attempt is gone on with
        self.first: tuple[float, float] | None = (
            None  # first amount beyond that, and when: what is slow at first is over
        )
        self.artifact: Any = None
        self.lock = threading.Lock()

    def update(self, done: float, total: float) -> None:
        now = time.monotonic()
        with self.lock:
            if self.there is None:
                self.there, self.began = done, now
            if self.first is None and done > self.there:
                self.first = done, now
            last = done >= total and self.artifact is not None
            if self.task_run is None or not total or now - self.began < SHOWN_AFTER:
                return
            if now - self.told < EVERY and not last:
                return
            self.told = now
            self._tell(100 * done / total, self._describe(done, total, now))

    def _describe(self, done: float, total: float, now: float) -> str:
        first, since = self.first or (done, now)
        rate = (done - first) / (now - since) if done > first else 0.0
        left = f", {clock((total - done) / rate)} left" if rate > 0 and done < total else ""
        if self.unit == "bytes":
            return f"{size(done)} of {size(total)}, {size(rate)}/s{left}"
        return f"{done:.0f} of {total:.0f} {self.unit}{left}"

    def _tell(self, percent: float, text: str) -> None:
        from prefect.client.orchestration import get_client
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        try:
            with get_client(sync_client=True) as client:
                if self.artifact is None:
                    run = self.task_run
                    new = ArtifactCreate(
                        key=self.key,
                        type="progress",
                        description=text,
                        data=percent,
                        task_run_id=run.id,
                        flow_run_id=run.flow_run_id,
                    )
                    self.artifact = client.create_artifact(new).id
                else:
                    client.update_artifact(self.artifact, ArtifactUpdate(description=text, data=percent))
        except Exception:  # a bar is not worth a stage
            pass


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
