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
        tags |= self._note("A run of the flow")
        self._whole = tracking.start(folder, None, run.track.experiment, id, name, tags, _flat(run), run.track.wandb)
        self._stages: dict[str, tracking.Stage] = {}
        self._training_links: dict[str, str] = {}
        self._reinforcement_links: dict[str, str] = {}

    def stage(self, name: str, stage: Stage) -> tracking.Stage:
        """The stage's part of the tracking. Training has a separate run, also if several flow runs continue it."""
        if name not in self._stages:
            if name == "train":
                tags = {"finetune.fingerprint": stage.fingerprint, "finetune.stage": name}
                tags |= {f"finetune.input.{key}": value for key, value in stage.inputs.items()}
                tags |= {"finetune.conf": self._run.name} | self._note("The training")
                id, params = f"train-{stage.fingerprint}", _flat(stage.config)
                self._stages[name] = self._whole.stage(f"{name} {self.name}", id, tags, params)
            else:
                self._stages[name] = self._whole.part(name)
                self._stages[name].tags({"begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"})
        return self._stages[name]

    def made(self, name: str, stage: Stage, made: Artifact) -> None:
        """Log the artifact of a stage, new or cached, and end its run."""
        tags = {"finetune.artifact": self._store.link(f"{made.key}/files"), "finetune.digest": made.digest}
        if made.cached:
            self._whole.tags({f"finetune.{name}.made_by": made.made["flow"]})
            return
        tracked = self.stage(name, stage)
        tracked.tags(tags)
        if name != "train":  # its results are the last values of its curves
            tracked.metrics({key: value for key, value in made.result.items() if isinstance(value, int | float)})
        tracked.metrics({"seconds": made.made["seconds"], "gigabytes": made.size / 1e9})
        tracked.end("FINISHED")

    def ship(self) -> None:
        """Send the events of the journal, and all later ones."""
        self._whole.ship()

    def training_run(self) -> str | None:
        """MLflow's id of the training's run, of this flow or of the flow that made it; None until MLflow has it."""
        if tracked := self._stages.get("train"):
            return self._whole.run_id(tracked.run)
        pages = self.pages()
        return pages.trainings.get(self.training) if pages else None

    def pages(self) -> Pages | None:
        """MLflow's pages, if a server shows them."""
        return mlflow_pages.find(self.uri, self._run.track.experiment, self._run.name)

    def links_of_training(self) -> dict[str, str]:
        """Links for the page of a running training. They are looked up until MLflow has the run."""
        if not self._training_links and (id := self.training_run()) and (pages := self.pages()):
            self._training_links = {"MLflow, live curves": pages.curves(id)}
            if compared := pages.compared(id):
                self._training_links["MLflow, this training compared with earlier ones"] = compared
        return self._own_link() | self._training_links

    def links_of_reinforcement(self) -> dict[str, str]:
        """Links for the page of a running reinforcement learning. Its curves are in this flow's MLflow run."""
        if not self._reinforcement_links and (id := self._whole.run_id()) and (pages := self.pages()):
            self._reinforcement_links = {"MLflow, live curves": pages.curves(id)}
        return self._own_link() | self._reinforcement_links

    def _own_link(self) -> dict[str, str]:
        return {"Prefect, this run": self.prefect} if self.prefect else {}

    def own_run(self) -> str | None:
        """MLflow's id of this flow run; None if all stages were cached, or without a server that answers in time."""
        until = time.monotonic() + LINK_WITHIN
        while self._whole.shipping and not self._whole.run_id() and time.monotonic() < until:
            time.sleep(0.05)
        return self._whole.run_id()

    def _note(self, what: str) -> dict[str, str]:
        """Description that MLflow shows above a run."""
        where = f"[{self.name}]({self.prefect})" if self.prefect else self.name
        return {NOTE: f"{what} {where} of `{self._run.name}`, in Prefect."}

    def tell(self, values: dict[str, float]) -> None:
        """Log metrics of the whole run."""
        self._whole.metrics(values)

    def tell_at_end(self, values: dict[str, float]) -> None:
        """Log less important metrics of the whole run after its results."""
        self._whole.metrics_at_end(values)

    def describe(self, verdict: str) -> None:
        """Show a verdict in Markdown above the run."""
        self._whole.tags({NOTE: f"{verdict}\n\n{self._note('A run of the flow')[NOTE]}"})

    def draw(self, content: bytes, name: str, of: str) -> None:
        """Log a JSON file of the whole run, and its figures."""
        self._whole.drawn(content, name, of)

    def refuse(self, reason: str) -> None:
        """End a run that could not begin. A background process ships its events."""
        self._whole.end("FAILED", reason)
        self._whole.close(0.0)

    def end(self, status: str, reason: str, outcomes: Outcomes) -> None:
        """End the whole run, and the runs of stages that have not ended."""
        killed = status == "KILLED"
        for name, tracked in self._stages.items():
            if outcome := outcomes.by_stage.get(name):
                tracked.end("KILLED" if killed else "FAILED", outcome.reason)
            else:
                tracked.end("KILLED", reason)
        if reason:
            self.describe(f"**{status.capitalize()}**: {words(reason)}")
        self._whole.end(status, reason)
        if status == "FINISHED" and not self._whole.shipping:
            self._whole.drop()
            return
        if line := self._whole.close(0.0 if killed else SHIPPED_WITHIN, hand_over=killed):
            print(line)


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if isinstance(value, Run):
        value = value.model_dump(mode="json", exclude={"paths"})
    if not isinstance(value, dict):
        return {place: value}
    return {
        key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{place}.{name}".lstrip(".")).items()
    }
