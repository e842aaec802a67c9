"""A flow run in MLflow: one run for the whole flow, and one for the training unless it is cached.

Prefect and MLflow link to each other. A flow run whose stages are all cached adds no run.
"""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.utilities.urls import url_for

from conf.schema.run import Run
from tasks import tracking
from tasks.pages.markdown import words
from tasks.run import accounts
from tasks.run.artifact import Artifact, Stage
from tasks.run.outcomes import Outcomes
from tasks.store import Store
from tasks.tracking import mlflow_pages
from tasks.tracking.address import resolve
from tasks.tracking.mlflow_pages import Pages

LINK_WITHIN = 5.0  # seconds that the report waits for MLflow's address of the run
NOTE = "mlflow.note.content"  # the tag that MLflow shows as a description
SHIPPED_WITHIN = 15.0  # seconds that the end of a run waits for a slow tracking server


class RunTracking:
    """Tracking of one flow run. Events stay in a journal until ship(), which the first stage that runs calls."""

    def __init__(self, run: Run, name: str, id: str, stages: dict[str, Stage], store: Store, folder: Path):
        self.name, self.uri, self._store, self._run = name, resolve(None, folder), store, run
        self.training = stages["train"].fingerprint
        self.prefect = url_for("flow-run", obj_id=id) or ""
        tags = {"finetune.flow_run": id, "finetune.store": store.uri, "finetune.conf": run.name}
        tags |= {f"finetune.{name}": stage.fingerprint for name, stage in stages.items()}
        tags |= accounts.tags(run) | self._note("A run of the flow")
        self.whole = tracking.start(folder, None, run.track.experiment, id, name, tags, _flat(run), run.track.wandb)
        self._stages: dict[str, tracking.Stage] = {}
        self._looked_up: dict[bool, dict[str, str]] = {}

    def stage(self, name: str, stage: Stage) -> tracking.Stage:
        """Return the stage's part of the tracking. Training has one separate run, even across flow runs."""
        if name not in self._stages:
            if name == "train":
                tags = {"finetune.fingerprint": stage.fingerprint, "finetune.stage": name}
                tags |= {f"finetune.input.{key}": value for key, value in stage.inputs.items()}
                tags |= {"finetune.conf": self._run.name} | accounts.tags(self._run) | self._note("The training")
                id, params = f"train-{stage.fingerprint}", _flat(stage.config)
                self._stages[name] = self.whole.stage(f"{name} {self.name}", id, tags, params)
            else:
                self._stages[name] = self.whole.part(name)
                self._stages[name].tags({"begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"})
        return self._stages[name]

    def made(self, name: str, stage: Stage, made: Artifact) -> None:
        """Log the artifact of a stage, new or cached, and end its run."""
        tags = {"finetune.artifact": self._store.link(f"{made.key}/files"), "finetune.digest": made.digest}
        if made.cached:
            self.whole.tags({f"finetune.{name}.made_by": made.made["flow"]})
            return
        tracked = self.stage(name, stage)
        tracked.tags(tags)
        if name != "train":  # its results are the last values of its curves
            tracked.metrics({key: value for key, value in made.result.items() if isinstance(value, int | float)})
        tracked.metrics({"seconds": made.made["seconds"], "gigabytes": made.size / 1e9})
        tracked.end("FINISHED")

    def training_run(self) -> str | None:
        """Return MLflow's id of the training's run, from this flow or an earlier one; None until MLflow has the run."""
        if tracked := self._stages.get("train"):
            return self.whole.run_id(tracked.run)
        pages = self.pages()
        return pages.trainings.get(self.training) if pages else None

    def pages(self) -> Pages | None:
        """Return MLflow's pages, or None without a server."""
        return mlflow_pages.find(self.uri, self._run.track.experiment, self._run.name)

    def links(self, of_training: bool) -> dict[str, str]:
        """Return links for the page of a running training, or of reinforcement learning (curves are in the flow run).

        The look-up is repeated until MLflow has the run.
        """
        id = None if of_training in self._looked_up else self.training_run() if of_training else self.whole.run_id()
        if id and (pages := self.pages()):
            links = {"MLflow, live curves": pages.curves(id)}
            if of_training and (others := pages.compared(id)):
                links["MLflow, this training compared with earlier ones"] = others
            self._looked_up[of_training] = links
        prefect = {"Prefect, this run": self.prefect} if self.prefect else {}
        return prefect | self._looked_up.get(of_training, {})

    def own_run(self) -> str | None:
        """Return MLflow's id of the flow run; None if all stages were cached or the server does not answer in time."""
        until = time.monotonic() + LINK_WITHIN
        while self.whole.shipping and not self.whole.run_id() and time.monotonic() < until:
            time.sleep(0.05)
        return self.whole.run_id()

    def _note(self, what: str) -> dict[str, str]:
        """Return the tag with the description that MLflow shows above a run."""
        where = f"[{self.name}]({self.prefect})" if self.prefect else self.name
        return {NOTE: f"{what} {where} of `{self._run.name}`, in Prefect."}

    def describe(self, verdict: str) -> None:
        """Show a verdict in Markdown above the run."""
        self.whole.tags({NOTE: f"{verdict}\n\n{self._note('A run of the flow')[NOTE]}"})

    def refuse(self, reason: str) -> None:
        """End a run that could not begin. A background process ships its events."""
        self.whole.end("FAILED", reason)
        self.whole.close(0.0)

    def end(self, status: tracking.Status, reason: str, outcomes: Outcomes) -> None:
        """End the whole run, and the runs of stages that have not ended."""
        killed = status == "KILLED"
        for name, tracked in self._stages.items():
            if outcome := outcomes.by_stage.get(name):
                tracked.end("KILLED" if killed else "FAILED", outcome.reason)
            else:
                tracked.end("KILLED", reason)
        if reason:
            self.describe(f"**{status.capitalize()}**: {words(reason)}")
        self.whole.end(status, reason)
        if status == "FINISHED" and not self.whole.shipping:
            self.whole.drop()
            return
        if line := self.whole.close(0.0 if killed else SHIPPED_WITHIN, hand_over=killed):
            print(line)


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Return values by dotted keys."""
    if isinstance(value, Run):
        value = value.model_dump(mode="json", exclude={"paths"})
    if not isinstance(value, dict):
        return {place: value}
    return {
        key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{place}.{name}".lstrip(".")).items()
    }
