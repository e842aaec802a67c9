"""One run of the flow, from its first stage to its last: what the stages share.

stage(step) returns a stage's part (tasks/run/stage_run.py). `outcomes` has the end of each stage; `tracking` reports
all of it to MLflow.
"""

import json
import threading
import time
from contextlib import AbstractContextManager
from typing import Self

from conf.host import nvidia_smi
from conf.rules import gpus
from conf.schema.run import Run
from contract.faults import Fault
from tasks.run.outcomes import Outcomes
from tasks.run.places import open_run_store, runs_folder
from tasks.run.run_tracking import RunTracking
from tasks.run.stage_run import StageRun
from tasks.run.steps import Request, Step
from tasks.store.durable import plainly


class Session(AbstractContextManager):
    def __init__(self, run: Run, request: Request, id: str, name: str):
        self.run, self.request, self.id, self.name = run, request, id, name
        self.folder, self.store = runs_folder(), open_run_store()
        self.outcomes = Outcomes(request.stages)
        self.started = time.time()
        self.ending = threading.Event()

    def __enter__(self) -> Self:
        with plainly(self.folder):
            self.tracking = RunTracking(self.run, self.name, self.id, self.request.stages, self.store, self.folder)
        try:
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
        """Everything of the run that the stage's task needs."""
        return StageRun(self, step)

    def earlier(self, step: Step) -> dict[str, bool]:
        """Stages that end before the step although they are not its inputs, and whether they have to succeed.

        A base that cannot be evaluated should show before hours of training. If this host has GPUs for both
        (conf/rules/gpus.py), they run at the same time.
        """
        if not step.after or gpus.beside(self.run, len(nvidia_smi.visible())):
            return {}
        return {step.after: self.run.evaluate.base == "required"}

    def has_ended(self, name: str) -> None:
        """Stop training if the base's evaluation has ended without a result that evaluate.base requires."""
        outcome = self.outcomes.by_stage.get(name)
        if name == "evaluate-base" and outcome and outcome.failed and self.run.evaluate.base == "required":
            self.outcomes.pointless = "evaluate-base failed; evaluate.base=optional trains without its result"

    def _note(self, status: str) -> None:
        """Write down which artifacts this run refers to: flows.artifacts keeps them."""
        keys = [stage.key for stage in self.request.stages.values()]
        note = {"name": self.name, "conf": self.run.name, "started": self.started, "status": status, "artifacts": keys}
        try:
            self.store.write(f"runs/{self.id}.json", json.dumps(note, indent=1).encode())
        except Fault:
            if status == "running":  # later, the fault of the stage that met it first is the one to show
                raise
