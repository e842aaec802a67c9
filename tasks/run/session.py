"""One run of the flow, from its first stage to its last: it begins and ends what the stages share.

Each stage gets its part of it: stage(name), in tasks/run/stage_run.py. How they ended is in outcomes
(tasks/run/outcomes.py), and MLflow is told everything as well: tracking (tasks/run/run_tracking.py).
"""

import json
import threading
import time
from contextlib import AbstractContextManager
from typing import Any, Self

from prefect import allow_failure

from conf.host import nvidia_smi
from conf.rules import gpus, objectives, reinforcement
from conf.schema.run import Run
from contract.faults import Fault
from tasks.run.outcomes import Outcomes
from tasks.run.places import open_run_store, runs_folder
from tasks.run.request import Request
from tasks.run.run_tracking import RunTracking
from tasks.run.stage_run import StageRun
from tasks.store.durable import plainly


class Session(AbstractContextManager):
    def __init__(self, run: Run, request: Request, id: str, name: str):
        self.run, self.request, self.id, self.name = run, request, id, name
        self.folder, self.store = runs_folder(), open_run_store()
        self.outcomes = Outcomes(request.stages)
        self.started = time.time()
        self._ending = threading.Event()

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
        self._ending.set()
        verdict = self.outcomes.verdict()
        if kind:
            status = "FAILED" if issubclass(kind, Exception) else "KILLED"  # a signal is no Exception
            reason = f"{kind.__name__}: {error}"
        else:
            status, reason = ("FAILED", verdict.message or "") if verdict.is_failed() else ("FINISHED", "")
        self._note(status.lower())
        self.tracking.end(status, reason, self.outcomes)

    def stage(self, name: str) -> StageRun:
        """All that the stage's task needs of the run."""
        run = reinforcement.of_prompts(self.run) if name == "prepare-prompts" else self.run
        run = objectives.of_teacher(run) if name.endswith("-teacher") else run
        return StageRun(name, run, self.request, self.store, self.folder, self.tracking, self.outcomes, self._ending)

    def before_training(self, base: Any) -> list[Any] | None:
        """Tasks that training waits for beside its inputs: a base that cannot be evaluated is found before the hours.

        Where this host has room for both (conf/rules/gpus.py), they go on beside one another.
        """
        if gpus.beside(self.run, len(nvidia_smi.visible())):
            return None
        return [base] if self.run.evaluate.base == "required" else [allow_failure(base)]

    def require_base(self) -> None:
        """Stop training if the base's evaluation has ended without a result (evaluate.base)."""
        outcome = self.outcomes.by_stage.get("evaluate-base")
        if outcome and outcome.failed and self.run.evaluate.base == "required":
            mended = "with evaluate.base=optional it would train all the same"
            self.outcomes.pointless = f"evaluate-base has failed; {mended}"

    def _note(self, status: str) -> None:
        """Write down which artifacts this run refers to: flows.artifacts keeps them."""
        keys = [stage.key for stage in self.request.stages.values()]
        note = {"name": self.name, "conf": self.run.name, "started": self.started, "status": status, "artifacts": keys}
        try:
            self.store.write(f"runs/{self.id}.json", json.dumps(note, indent=1).encode())
        except Fault:
            if status == "running":  # later, the fault of the stage that met it first is the one to show
                raise
