"""One run of the flow: its configuration, the store, what each stage asks for, and what became of it.

A stage's task calls obtain(name, make). It ends in a state that says how: Cached, Completed, Failed with one line, or
NotAsked for what lies behind --until.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prefect import State, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed

from conf.schema import Run
from tasks import artifact
from tasks.artifact import Artifact, Stage, Work
from tasks.faults import Fault
from tasks.progress import Progress
from tasks.store import Store, open_store

ATTEMPTS = 3  # of a stage that fails through no fault of the user's; each goes on where the last one ended
OPTIONS: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


@dataclass(frozen=True)
class Outcome:
    """What became of a stage."""

    state: str  # Cached, Completed, Failed, NotAsked
    seconds: float
    artifact: Artifact | None = None
    reason: str = ""


def runs_folder() -> Path:
    return Path(os.environ.get("FINETUNE_RUNS", "runs")).absolute()


def store_uri() -> str:
    return os.environ.get("FINETUNE_STORE") or str(runs_folder() / "store")


class Session(AbstractContextManager):
    def __init__(self, run: Run, stages: dict[str, Stage], flow: str, first: str | None, last: str | None):
        self.run, self.stages, self.flow = run, stages, flow
        self.store: Store = open_store(store_uri())
        self.folder = runs_folder()
        self.outcomes: dict[str, Outcome] = {}
        self._ending = threading.Event()
        order = list(stages)
        self._asked = order[: order.index(last) + 1] if last else order
        self._anew = order[order.index(first) :] if first else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Also when the run is cancelled: whatever was started is stopped."""
        self._ending.set()

    def at(self, **paths: Path) -> Run:
        """The configuration with these paths."""
        changed = self.run.paths.model_copy(update={key: str(path) for key, path in paths.items()})
        return self.run.model_copy(update={"paths": changed})

    def local(self, made: Artifact) -> Path:
        """A folder of this host that holds the artifact's files. Never write there."""
        bar = Progress("fetch", "bytes")
        return artifact.local(made, self.store, self.folder / "cache", bar.update)

    def stopped(self, work: Work) -> Callable[[], bool]:
        return lambda: self._ending.is_set() or work.lease.lost.is_set()

    def obtain(
        self,
        name: str,
        make: Callable[[Work], dict[str, Any]],
        valid: Callable[[Artifact], bool] = lambda _: True,
    ) -> State:
        """The stage's artifact, made if need be, as the state that its task ends in."""
        if name not in self._asked:
            self.outcomes[name] = Outcome("NotAsked", 0.0)
            return Completed(name="NotAsked", message="lies behind --until")
        start = time.monotonic()
        try:
            made = self._obtain(name, make, valid)
        except Fault as fault:
            self.outcomes[name] = Outcome("Failed", time.monotonic() - start, reason=str(fault))
            return Failed(message=str(fault), data=fault)
        seconds = time.monotonic() - start
        state = "Cached" if made.cached else "Completed"
        self.outcomes[name] = Outcome(state, seconds, made)
        message = f"{made.key}, made in {made.made['seconds']:.0f} s" if made.cached else f"{made.key}"
        return Completed(name=state, message=message, data=made)

    def _obtain(self, name: str, make: Callable[[Work], dict[str, Any]], valid: Callable[[Artifact], bool]) -> Artifact:
        stage, say = self.stages[name], _logger().info
        anew = name in self._anew
        if not anew and isinstance(found := artifact.find(stage, self.store), Artifact):
            if valid(found):
                return found
            anew = True
        made = {"flow": self.flow, "run": self.run.name}
        progress = Progress(f"store-{name}", "bytes").update
        return artifact.obtain(stage, self.store, make, self.folder / "work", say, made, anew, progress)

    def follow(self, name: str, metrics: Path) -> None:
        pass

    def mlflow_run(self, name: str) -> str | None:
        return None

    @property
    def tracking_uri(self) -> str:
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder / 'mlflow.db'}"


def _logger() -> logging.Logger | logging.LoggerAdapter:
    return get_run_logger()
