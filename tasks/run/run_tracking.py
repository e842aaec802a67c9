"""A flow run in MLflow: one run for the whole, and one for the training if it is made.

Prefect and MLflow link both ways. A flow run that finds everything made adds none.
"""

import time
from collections.abc import Callable
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
TOLD_WITHIN = 15.0  # seconds that the end of a run waits for a slow tracking server


class RunTracking:
    """Tracking of one flow run. It writes to a journal until the first stage is made: ship()."""

    def __init__(self, run: Run, name: str, id: str, stages: dict[str, Stage], store: Store, folder: Path):
        self.name, self.uri, self._store, self._run = name, resolve(None, folder), store, run
        self.training = stages["train"].fingerprint
        self.prefect = url_for("flow-run", obj_id=id) or ""
        tags = {"finetune.flow_run": id, "finetune.store": store.uri, "finetune.conf": run.name}
        tags |= {f"finetune.{name}": stage.fingerprint for name, stage in stages.items()}
        tags |= self._note("A run of the flow")
        self.whole = tracking.start(folder, None, run.track.experiment, id, name, tags, _flat(run), run.track.wandb)
        self._stages: dict[str, tracking.Stage] = {}
        self._found_links: dict[str, dict[str, str]] = {}

    def stage(self, name: str, asked: Stage) -> tracking.Stage:
        """The stage's part of the tracking. Training has a run of its own, however often it is continued."""
        if name not in self._stages:
            if name == "train":
                tags = {"finetune.fingerprint": asked.fingerprint, "finetune.stage": name}
                tags |= {f"finetune.input.{key}": value for key, value in asked.inputs.items()}
                tags |= {"finetune.conf": self._run.name} | self._note("The training")
                own = self.whole.stage(f"{name} {self.name}", f"train-{asked.fingerprint}", tags, _flat(asked.config))
            else:
                own = self.whole.part(name)
                own.tags({"begun": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"})
            self._stages[name] = own
        return self._stages[name]

    def made(self, name: str, asked: Stage, made: Artifact) -> None:
        """Log what a stage has made or found, and end its run."""
        tags = {"finetune.artifact": self._store.link(f"{made.key}/files"), "finetune.digest": made.digest}
        if made.cached:
            self.whole.tags({f"finetune.{name}.made_by": made.made["flow"]})
            return
        tracked = self.stage(name, asked)
        tracked.tags(tags)
        if name != "train":  # whose results are the last of its curves
            tracked.metrics({key: value for key, value in made.result.items() if isinstance(value, int | float)})
        tracked.metrics({"seconds": made.made["seconds"], "gigabytes": made.size / 1e9})
        tracked.end("FINISHED")

    def training_run(self) -> str | None:
        """MLflow's id of the run that trained, once MLflow has it: this flow's, or that of the flow that made it."""
        if tracked := self._stages.get("train"):
            return self.whole.run_id(tracked.run)
        pages = self.pages()
        return pages.trainings.get(self.training) if pages else None

    def pages(self) -> Pages | None:
        """MLflow's pages, where a server shows them."""
        return mlflow_pages.find(self.uri, self._run.track.experiment, self._run.name)

    def links_of_training(self) -> dict[str, str]:
        """Pages of a training under way. They are looked up until MLflow has the run."""
        return self._links(self.training_run, compared=True)

    def links_of_reinforcement(self) -> dict[str, str]:
        """Pages of a reinforcement learning under way. Its curves are in this flow's MLflow run."""
        return self._links(self.whole.run_id)

    def _links(self, find: Callable[[], str | None], compared: bool = False) -> dict[str, str]:
        key = "compared" if compared else "own"
        if key not in self._found_links and (id := find()) and (pages := self.pages()):
            found = {"MLflow, curves that move": pages.curves(id)}
            if compared and (others := pages.compared(id)):
                found["MLflow, this training compared with earlier ones"] = others
            self._found_links[key] = found
        prefect = {"Prefect, this run": self.prefect} if self.prefect else {}
        return prefect | self._found_links.get(key, {})

    def own_run(self) -> str | None:
        """MLflow's id of this flow run; None where everything was made, no server is there, or none answers in time."""
        until = time.monotonic() + LINK_WITHIN
        while self.whole.shipping and not self.whole.run_id() and time.monotonic() < until:
            time.sleep(0.05)
        return self.whole.run_id()

    def _note(self, what: str) -> dict[str, str]:
        """What MLflow shows above a run."""
        where = f"[{self.name}]({self.prefect})" if self.prefect else self.name
        return {NOTE: f"{what} {where} of `{self._run.name}`, in Prefect."}

    def describe(self, verdict: str) -> None:
        """Show a verdict in Markdown above the run."""
        self.whole.tags({NOTE: f"{verdict}\n\n{self._note('A run of the flow')[NOTE]}"})

    def refuse(self, reason: str) -> None:
        """End a run that could not begin. Nothing was shipped: another process does that."""
        self.whole.end("FAILED", reason)
        self.whole.close(0.0)

    def end(self, status: str, reason: str, outcomes: Outcomes) -> None:
        """End the run as a whole, and the runs of those stages that have not ended."""
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
        if line := self.whole.close(0.0 if killed else TOLD_WITHIN, hand_over=killed):
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
