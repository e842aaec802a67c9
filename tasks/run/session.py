"""One run of the flow: the state that its stages share, and the run of each stage.

Session.stage(step) returns a StageRun. The stage's task calls its get_or_make(make) and ends as Cached, Completed,
Failed with a one-line reason, or NotAsked. NotAsked means that the stage comes after the last requested stage, or that
evaluate.tasks is empty. `outcomes` has the outcome of each stage; `tracking` reports to MLflow.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from prefect import State, get_run_logger
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, Completed, Failed

from conf.host import nvidia_smi
from conf.planner.hardware import Gpu
from conf.rules import gpus, reinforcement
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault, Stopped
from tasks import tracking
from tasks.run import accounts, artifact, launch
from tasks.run.artifact import Artifact, Work
from tasks.run.outcomes import Outcome, Outcomes
from tasks.run.places import open_run_store, runs_folder
from tasks.run.progress import Progress
from tasks.run.run_tracking import RunTracking
from tasks.run.steps import Request, Step
from tasks.store.durable import plainly


def may_pass(task, task_run, state: State) -> bool:
    """Return whether a retry that resumes from the last attempt can help."""
    return not isinstance(state.result(raise_on_failure=False), Fault | Stopped)


def _may_pass(task, task_run, state: State) -> bool:
    """Return whether a retry from the start can help. A crash in native code would repeat."""
    return not isinstance(state.result(raise_on_failure=False), Fault | Stopped | launch.Crashed)


OPTIONS: dict[str, Any] = {
    "task_run_name": "{stage_run.name}",
    "cache_policy": NO_CACHE,  # tasks/run/artifact.py finds existing artifacts
    "persist_result": False,
    "retries": 1,
    "retry_delay_seconds": 5,
    "retry_condition_fn": _may_pass,
}


class StageRun:
    """The run of one stage. It is not a dataclass: Prefect would search all its fields for futures."""

    def __init__(self, session: "Session", step: Step):
        self.name, self.run, request = step.name, step.view(session.run), session.request
        self.store, self.tracking = session.store, session.tracking
        self.asked = request.stages[self.name]
        self.trains = "train" not in request.unasked
        self.reinforces = reinforcement.is_asked(self.run) and "reinforce" not in request.unasked
        self._unasked, self._make_again = request.unasked.get(self.name), self.name in request.again
        self._folder, self._outcomes, self._ending = session.folder, session.outcomes, session.ending
        self._gpus = accounts.processes(session.run, session.spent.gpu, self.name)

    def tracked(self) -> tracking.Stage:
        """The stage's run in MLflow."""
        return self.tracking.stage(self.name, self.asked)

    @property
    def pointless(self) -> str:
        """The reason why training is pointless, or ""."""
        return self._outcomes.pointless

    def at(self, work: Work, **paths: Artifact | Path | None) -> Run:
        """Return the configuration with these paths and the logs' path. An artifact becomes its folder on this host."""
        local = {key: self.local(path) if isinstance(path, Artifact) else path for key, path in paths.items() if path}
        local["logs"] = work.folder / "logs"
        return self.run.changed(paths={key: str(path) for key, path in local.items()})

    def local(self, made: Artifact) -> Path:
        """Return a folder on this host with the artifact's files. Never write to it."""
        return artifact.local(made, self.store, self._folder / "cache")

    def stopped(self, work: Work, fenced: bool = False) -> Callable[[], bool]:
        """Return a function that returns whether work must end.

        It must end if the run is cancelled, another process has the work, or training is pointless. While the store
        does not answer, this process cannot know whether it has the work. `fenced` work then continues: a successor
        would wait.
        """
        lost = work.lease.taken if fenced else work.lease.lost
        return lambda: self._ending.is_set() or lost.is_set() or (self.name == "train" and bool(self.pointless))

    def turn(self, say: Callable[[str], None]) -> launch.Turn:
        """The stage's turn at its share of this host's GPUs. The reason for waiting is logged and sent to MLflow."""
        began: list[float] = []
        tracked, flow = self.tracked(), self.tracking.name

        def waits(line: str) -> None:
            began.append(time.monotonic())
            say(line)
            tracked.tags({"finetune.waits": line})

        def has(taken: tuple[str, ...]) -> None:
            if taken:
                tracked.tags({"finetune.gpus": ", ".join(taken)})
            if began:
                tracked.tags({"finetune.waits": "no longer"})
                tracked.metrics({"gpu_wait_seconds": time.monotonic() - began[0]})

        count, rank = gpus.takes(self.run, self.name).gpus, int(self.name.startswith("evaluate"))
        return launch.Turn(f"{self.name} of {flow}", waits, has, count, flow, rank)

    def get_or_make(
        self,
        make: Callable[[Work], dict[str, Any]],
        valid: Callable[[Artifact], bool] = lambda _: True,
        require: Callable[[Artifact], None] = lambda _: None,
    ) -> State:
        """Make the stage's artifact if it is missing, and return the final state of its task.

        `require` raises a Fault if this run cannot use the artifact, which stays in the store.
        """
        if self._unasked:
            self._end(Outcome("NotAsked", 0.0))
            return Completed(name="NotAsked", message=self._unasked)
        start = time.monotonic()
        try:
            made = self._get_or_make(make, valid)
            require(made)
        except Fault as fault:
            self._end(Outcome("Failed", time.monotonic() - start, reason=str(fault)))
            self.tracked().end("FAILED", str(fault))
            return Failed(message=str(fault), data=fault)
        except Stopped as stopped:  # the run is cancelled, or another process has the work
            self._end(Outcome("Crashed", time.monotonic() - start, reason=f"Stopped: {stopped}"))
            return Cancelled(message=str(stopped))
        except BaseException as error:  # the task may try again
            self._end(Outcome("Crashed", time.monotonic() - start, reason=f"{type(error).__name__}: {error}"))
            raise
        state = "Cached" if made.cached else "Completed"
        self._end(Outcome(state, time.monotonic() - start, made))
        self.tracking.made(self.name, self.asked, made)
        spent = f", made in {made.made['seconds']:.0f} s by {made.made['flow']}" if made.cached else ""
        return Completed(name=state, message=made.key + spent, data=made)

    def _end(self, outcome: Outcome) -> None:
        self._outcomes.by_stage[self.name] = outcome

    def _get_or_make(self, make: Callable[[Work], dict[str, Any]], valid: Callable[[Artifact], bool]) -> Artifact:
        say, make_again = get_run_logger().info, self._make_again
        if not make_again and isinstance(found := artifact.find(self.asked, self.store), Artifact):
            if valid(found):
                return found
            make_again = True

        def tracked(work: Work) -> dict[str, Any]:
            self.tracked()
            self.tracking.whole.ship()
            project, holder, stop = self.run.track.project, f"{self.name} of {self.tracking.name}", self.stopped(work)
            with accounts.gpus_of_project(project, self._gpus, holder, say, stop):
                return make(work)

        made = {"flow": self.tracking.name, "run": self.run.name}
        progress = Progress(f"store-{self.name}", "bytes").update
        work, stop = self._folder / "work", self._ending.is_set
        return artifact.get_or_make(self.asked, self.store, tracked, work, say, made, make_again, progress, stop)


class Session(AbstractContextManager):
    def __init__(self, run: Run, request: Request, id: str, name: str, gpu: Gpu):
        self.run, self.request, self.id, self.name = run, request, id, name
        self.folder, self.store = runs_folder(), open_run_store()
        self.outcomes = Outcomes(request.stages)
        self.started = time.time()
        self.ending = threading.Event()
        self.spent = accounts.Spent(run, gpu)

    def __enter__(self) -> Self:
        with plainly(self.folder):
            self.tracking = RunTracking(self.run, self.name, self.id, self.request.stages, self.store, self.folder)
        try:
            self._spent_before = self._former()
            self._note("running")
        except Fault as fault:
            self.tracking.refuse(str(fault))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Stop everything that was started, also when the run is cancelled."""
        self.ending.set()
        verdict = self.outcomes.verdict()
        if kind:
            status = "FAILED" if issubclass(kind, Exception) else "KILLED"  # a signal does not raise an Exception
            reason = f"{kind.__name__}: {error}"
        else:
            status, reason = ("FAILED", verdict.message or "") if verdict.is_failed() else ("FINISHED", "")
        self._note(status.lower())
        self.tracking.end(status, reason, self.outcomes)

    def stage(self, step: Step) -> StageRun:
        """Return the StageRun that the stage's task needs."""
        return StageRun(self, step)

    def earlier(self, step: Step) -> dict[str, bool]:
        """Return stages that must end before the step but are not its inputs, and whether they must succeed.

        Training waits for the base's evaluation, because a failure should show before hours of training. If this host
        has GPUs for both (conf/rules/gpus.py), both run at the same time.
        """
        if not step.after or gpus.beside(self.run, len(nvidia_smi.visible())):
            return {}
        return {step.after: self.run.evaluate.base == "required"}

    def has_ended(self, name: str) -> None:
        """Note the cost of the stage. If the base's evaluation failed and is required, training is pointless."""
        outcome = self.outcomes.by_stage.get(name)
        if outcome and outcome.artifact and outcome.state == "Completed":
            self.spent.add(name, outcome.artifact)
            self._note("running")
        if name == "evaluate-base" and outcome and outcome.failed and self.run.evaluate.base == "required":
            self.outcomes.pointless = "evaluate-base failed; evaluate.base=optional trains without its result"

    def _note(self, status: str) -> None:
        """Record the artifacts that this run refers to: flows.artifacts keeps them."""
        keys = [stage.key for stage in self.request.stages.values()]
        note = {"name": self.name, "conf": self.run.name, "started": self.started, "status": status, "artifacts": keys}
        note |= {"owner": accounts.owner(self.run), "project": self.run.track.project}
        note |= {key: value + self._spent_before.get(key, 0.0) for key, value in self.spent.total().items()}
        try:
            self.store.write(f"runs/{self.id}.json", json.dumps(note, indent=1).encode())
        except Fault:
            if status == "running":  # later, the first fault of a stage is shown instead
                raise

    def _former(self) -> dict[str, float]:
        """Return what this run had used before it was killed."""
        note = self.store.read(f"runs/{self.id}.json")
        known = json_object.parse(note[0], f"runs/{self.id}.json") if note else {}
        return {key: known.get(key, 0.0) for key in ("gpu_hours", "usd")}
