"""One run of the flow: its configuration, the store, what each stage asks for, and how each stage ended.

A stage's task calls get_or_make(name, make). It ends in a state that says how: Cached, Completed, Failed with one line,
or NotAsked. NotAsked is for stages behind the last one that was asked for, and for evaluations where evaluate.tasks is
empty. MLflow is told everything as well (tasks/tracking/).
"""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from prefect import State, allow_failure, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.states import Completed, Failed

from conf.schema.run import Run
from contract import host_gpus
from contract.faults import Fault, Stopped
from tasks import tracking
from tasks.run import artifact, launch
from tasks.run.artifact import Artifact, Work
from tasks.run.progress import Progress
from tasks.run.request import Request
from tasks.store import Store, open_store
from tasks.tracking.address import resolve

LINK_WITHIN = 5.0  # seconds that the report waits for MLflow's address of the run
TOLD_WITHIN = 15.0  # seconds that the end of a run waits for a slow tracking server


@dataclass(frozen=True)
class Outcome:
    """The end of a stage."""

    state: str  # Cached, Completed, Failed (the caller can mend it), Crashed (nobody knows yet), NotAsked
    seconds: float
    artifact: Artifact | None = None
    reason: str = ""


def may_pass(task, task_run, state: State) -> bool:
    """Whether another attempt can help that goes on where the last one ended."""
    return not isinstance(state.result(raise_on_failure=False), Fault | Stopped)


def _may_pass(task, task_run, state: State) -> bool:
    """Whether another attempt can help that begins again. A crash in native code would come again."""
    return not isinstance(state.result(raise_on_failure=False), Fault | Stopped | launch.Crashed)


OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,  # tasks/run/artifact.py finds what was made before
    "persist_result": False,
    "retries": 1,
    "retry_delay_seconds": 5,
    "retry_condition_fn": _may_pass,
}


def runs_folder() -> Path:
    """The folder of all local files."""
    return Path(os.environ.get("FINETUNE_RUNS", "runs")).absolute()


def open_run_store() -> Store:
    """The store that FINETUNE_STORE names."""
    return open_store(os.environ.get("FINETUNE_STORE") or str(runs_folder() / "store"))


class Session(AbstractContextManager):
    def __init__(self, run: Run, request: Request, id: str, name: str):
        self.run, self.request, self.stages, self.id, self.name = run, request, request.stages, id, name
        self.folder, self.store = runs_folder(), open_run_store()
        self.outcomes: dict[str, Outcome] = {}
        self.started = time.time()
        self.pointless = ""  # why nothing is to be trained any more
        self._ending = threading.Event()
        self._tracked: dict[str, tracking.Stage] = {}

    def __enter__(self) -> Self:
        self.tracking_uri = resolve(None, self.folder)
        tags = {"finetune.flow_run": self.id, "finetune.store": self.store.uri}
        tags |= {f"finetune.{name}": stage.fingerprint for name, stage in self.stages.items()}
        track = self.run.track
        self._tracking = tracking.start(
            self.folder, None, track.experiment, self.id, self.name, tags, _flat(self.run), track.wandb
        )
        try:
            self._note("running")
        except Fault as fault:
            self._tracking.end("FAILED", str(fault))
            self._tracking.close(0.0)  # it has not begun to ship: another process does
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Stop everything that was started, also when the run is cancelled."""
        self._ending.set()
        verdict = self.verdict()
        if kind:
            status = "FAILED" if issubclass(kind, Exception) else "KILLED"  # a signal is no Exception
            reason = f"{kind.__name__}: {error}"
        else:
            status, reason = ("FAILED", verdict.message or "") if verdict.is_failed() else ("FINISHED", "")
        self._note(status.lower())
        for name, tracked in self._tracked.items():  # but for those that have ended already
            if outcome := self.outcomes.get(name):
                tracked.end("KILLED" if status == "KILLED" else "FAILED", outcome.reason)
            else:
                tracked.end("KILLED", reason)
        self._tracking.end(status, reason)
        killed = status == "KILLED"
        if line := self._tracking.close(0.0 if killed else TOLD_WITHIN, hand_over=killed):
            print(line)

    def verdict(self) -> State:
        """The state that the flow ends in."""
        states = [outcome.state for outcome in self.outcomes.values()]
        ends = {name: o.reason for name, o in self.outcomes.items() if o.state in ("Failed", "Crashed")}
        if ends and self.pointless and "train" not in self.outcomes:
            ends["train"] = f"not started: {self.pointless}"
        if ends or len(states) < len(self.stages):
            message = "\n".join(f"{name}: {reason}" for name, reason in ends.items()) or "not all stages have run"
            return Failed(message=message, name="Crashed" if "Crashed" in states else "Failed")
        cached = states.count("Cached")
        return Completed(message=f"{cached} stages cached, {states.count('Completed')} made")

    def at(self, **paths: Path) -> Run:
        """The configuration with these paths."""
        changed = self.run.paths.model_copy(update={key: str(path) for key, path in paths.items()})
        return self.run.model_copy(update={"paths": changed})

    def local(self, made: Artifact) -> Path:
        """A folder of this host that holds the artifact's files. Never write there."""
        return artifact.local(made, self.store, self.folder / "cache", Progress("fetch", "bytes").update)

    def stopped(self, work: Work, fenced: bool = False) -> Callable[[], bool]:
        """Return a function that says whether work has to end: the run is cancelled, or another process has the work.

        A store that is away may hide the latter. Work whose successor would wait for its end goes on meanwhile.
        """
        lost = work.lease.taken if fenced else work.lease.lost
        return lambda: self._ending.is_set() or lost.is_set()

    def turn(self, name: str, say: Callable[[str], None]) -> launch.Turn:
        """Turn of a stage that uses this host's GPUs, which others may have.

        The reason for waiting is reported everywhere.
        """
        began: list[float] = []

        def waits(line: str) -> None:
            tracked = self.tracked(name)
            if line:
                began.append(time.monotonic())
                say(line)
                tracked.tags({"finetune.waits": line})
            elif began:
                tracked.tags({"finetune.waits": "no longer"})
                tracked.metrics({"gpu_wait_seconds": time.monotonic() - began[0]})

        return launch.Turn(f"{name} of {self.name}", waits)

    def before_training(self, base: PrefectFuture) -> list[Any] | None:
        """Tasks that training waits for beside its inputs: a base that cannot be evaluated is found before the hours.

        Without GPUs, and on this host alone, both go on beside one another.
        """
        if self.run.gang.engine == "local" and not host_gpus.visible():
            return None
        return [base] if self.run.evaluate.base == "required" else [allow_failure(base)]

    def needs(self, base: PrefectFuture) -> None:
        """Wait for the base's evaluation. Where it ends without a result, nothing is trained (evaluate.base)."""
        base.wait()
        outcome = self.outcomes.get("evaluate-base")
        if outcome and outcome.state in ("Failed", "Crashed") and self.run.evaluate.base == "required":
            self.pointless = "evaluate-base has failed; with evaluate.base=optional it would train all the same"

    def get_or_make(
        self, name: str, make: Callable[[Work], dict[str, Any]], valid: Callable[[Artifact], bool] = lambda _: True
    ) -> State:
        """Make the stage's artifact if need be, and return the state that its task ends in."""
        if why := self.request.unasked.get(name):
            self.outcomes[name] = Outcome("NotAsked", 0.0)
            return Completed(name="NotAsked", message=why)
        start = time.monotonic()
        try:
            made = self._get_or_make(name, make, valid)
        except Fault as fault:
            self.outcomes[name] = Outcome("Failed", time.monotonic() - start, reason=str(fault))
            self.tracked(name).end("FAILED", str(fault))
            return Failed(message=str(fault), data=fault)
        except BaseException as error:  # the task may try again
            self.outcomes[name] = Outcome(
                "Crashed", time.monotonic() - start, reason=f"{type(error).__name__}: {error}"
            )
            raise
        state = "Cached" if made.cached else "Completed"
        self.outcomes[name] = Outcome(state, time.monotonic() - start, made)
        self._tell(name, made)
        spent = f", made in {made.made['seconds']:.0f} s by {made.made['flow']}" if made.cached else ""
        return Completed(name=state, message=made.key + spent, data=made)

    def tracked(self, name: str) -> tracking.Stage:
        """The stage's run in MLflow. Training is one run however often it is continued."""
        if name not in self._tracked:
            stage = self.stages[name]
            id = f"train-{stage.fingerprint}" if name == "train" else None
            tags = {"finetune.stage": name, "finetune.fingerprint": stage.fingerprint}
            tags |= {f"finetune.input.{key}": value for key, value in stage.inputs.items()}
            self._tracked[name] = self._tracking.stage(f"{name} {self.name}", id, tags, _flat(stage.config))
        return self._tracked[name]

    def mlflow_run(self, name: str) -> str | None:
        """MLflow's id of the stage's run, once MLflow has it."""
        tracked = self._tracked.get(name)
        return self._tracking.run_id(tracked.run) if tracked else None

    def link(self) -> str:
        """MLflow's page of this run; empty where no server shows one, or none has answered yet."""
        if not (self.tracking_uri.startswith("http") and self._tracking.shipping):
            return ""
        until = time.monotonic() + LINK_WITHIN
        while not (link := self._tracking.links().get("flow")) and time.monotonic() < until:
            time.sleep(0.05)
        return link or ""

    def tell(self, values: dict[str, float]) -> None:
        """Log metrics of the run as a whole."""
        self._tracking.metrics(values)

    def draw(self, content: bytes, name: str, of: str) -> None:
        """Log a JSON file of the run as a whole, and its figures."""
        self._tracking.drawn(content, name, of)

    def _get_or_make(
        self, name: str, make: Callable[[Work], dict[str, Any]], valid: Callable[[Artifact], bool]
    ) -> Artifact:
        stage, say = self.stages[name], get_run_logger().info
        make_again = name in self.request.again
        if not make_again and isinstance(found := artifact.find(stage, self.store), Artifact):
            if valid(found):
                return found
            make_again = True

        def tracked(work: Work) -> dict[str, Any]:
            self.tracked(name)
            self._tracking.ship()
            return make(work)

        made = {"flow": self.name, "run": self.run.name}
        progress = Progress(f"store-{name}", "bytes").update
        work, stop = self.folder / "work", self._ending.is_set
        return artifact.get_or_make(stage, self.store, tracked, work, say, made, make_again, progress, stop)

    def _tell(self, name: str, made: Artifact) -> None:
        if made.cached and name == "train":  # whoever made it has told all of it; this run only points there
            uri = self.store.link(f"{made.key}/files")
            tags = {"finetune.stage": name, "finetune.made_by": made.made["flow"]}
            tracked = self._tracking.stage(f"{name} {self.name}", None, tags)
            tracked.tags({"finetune.cached": "true", "finetune.artifact": uri})
        else:
            tracked = self.tracked(name)
            tags = {"finetune.artifact": self.store.link(f"{made.key}/files"), "finetune.digest": made.digest}
            tracked.tags(tags | {"finetune.cached": str(made.cached).lower()})
        tracked.metrics({key: value for key, value in made.result.items() if isinstance(value, int | float)})
        tracked.metrics({"seconds": made.made["seconds"], "gigabytes": made.size / 1e9})
        tracked.end("FINISHED")

    def _note(self, status: str) -> None:
        """Write down which artifacts this run refers to: flows.artifacts keeps them."""
        keys = [stage.key for stage in self.stages.values()]
        note = {"name": self.name, "conf": self.run.name, "started": self.started, "status": status, "artifacts": keys}
        try:
            self.store.write(f"runs/{self.id}.json", json.dumps(note, indent=1).encode())
        except Fault:
            if status == "running":  # later, the fault of the stage that met it first is the one to show
                raise


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if isinstance(value, Run):
        value = value.model_dump(mode="json", exclude={"paths"})
    if not isinstance(value, dict):
        return {place: value}
    return {
        key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{place}.{name}".lstrip(".")).items()
    }
