"""A flow run in MLflow: one run of MLflow's for the whole, and one for each stage that is made or found."""

import time
from pathlib import Path
from typing import Any

from conf.schema.run import Run
from tasks import tracking
from tasks.run.artifact import Artifact, Stage
from tasks.run.outcomes import Outcomes
from tasks.store import Store
from tasks.tracking.address import resolve

LINK_WITHIN = 5.0  # seconds that the report waits for MLflow's address of the run
TOLD_WITHIN = 15.0  # seconds that the end of a run waits for a slow tracking server


class RunTracking:
    """Tracking of one flow run. It writes to a journal until the first stage is made: ship()."""

    def __init__(self, run: Run, name: str, id: str, stages: dict[str, Stage], store: Store, folder: Path):
        self.name, self.uri, self._store = name, resolve(None, folder), store
        tags = {"finetune.flow_run": id, "finetune.store": store.uri}
        tags |= {f"finetune.{name}": stage.fingerprint for name, stage in stages.items()}
        self._whole = tracking.start(folder, None, run.track.experiment, id, name, tags, _flat(run), run.track.wandb)
        self._stages: dict[str, tracking.Stage] = {}

    def stage(self, name: str, asked: Stage) -> tracking.Stage:
        """The stage's run in MLflow. Training is one run however often it is continued."""
        if name not in self._stages:
            id = f"train-{asked.fingerprint}" if name == "train" else None
            tags = {"finetune.stage": name, "finetune.fingerprint": asked.fingerprint}
            tags |= {f"finetune.input.{key}": value for key, value in asked.inputs.items()}
            self._stages[name] = self._whole.stage(f"{name} {self.name}", id, tags, _flat(asked.config))
        return self._stages[name]

    def made(self, name: str, asked: Stage, made: Artifact) -> None:
        """Log what a stage has made or found, and end its run."""
        link = self._store.link(f"{made.key}/files")
        if made.cached and name == "train":  # whoever made it has told all of it; this run only points there
            tags = {"finetune.stage": name, "finetune.made_by": made.made["flow"]}
            tracked = self._whole.stage(f"{name} {self.name}", None, tags)
            tracked.tags({"finetune.cached": "true", "finetune.artifact": link})
        else:
            tracked = self.stage(name, asked)
            tags = {"finetune.artifact": link, "finetune.digest": made.digest}
            tracked.tags(tags | {"finetune.cached": str(made.cached).lower()})
        tracked.metrics({key: value for key, value in made.result.items() if isinstance(value, int | float)})
        tracked.metrics({"seconds": made.made["seconds"], "gigabytes": made.size / 1e9})
        tracked.end("FINISHED")

    def ship(self) -> None:
        """Send what was written, and all that follows."""
        self._whole.ship()

    def mlflow_run(self, name: str) -> str | None:
        """MLflow's id of the stage's run, once MLflow has it."""
        tracked = self._stages.get(name)
        return self._whole.run_id(tracked.run) if tracked else None

    def link(self) -> str:
        """MLflow's page of this run; empty where no server shows one, or none has answered yet."""
        if not (self.uri.startswith("http") and self._whole.shipping):
            return ""
        until = time.monotonic() + LINK_WITHIN
        while not (link := self._whole.links().get("flow")) and time.monotonic() < until:
            time.sleep(0.05)
        return link or ""

    def tell(self, values: dict[str, float]) -> None:
        """Log metrics of the run as a whole."""
        self._whole.metrics(values)

    def draw(self, content: bytes, name: str, of: str) -> None:
        """Log a JSON file of the run as a whole, and its figures."""
        self._whole.drawn(content, name, of)

    def refuse(self, reason: str) -> None:
        """End a run that could not begin. Nothing was shipped: another process does that."""
        self._whole.end("FAILED", reason)
        self._whole.close(0.0)

    def end(self, status: str, reason: str, outcomes: Outcomes) -> None:
        """End the run as a whole, and the runs of those stages that have not ended."""
        killed = status == "KILLED"
        for name, tracked in self._stages.items():
            if outcome := outcomes.by_stage.get(name):
                tracked.end("KILLED" if killed else "FAILED", outcome.reason)
            else:
                tracked.end("KILLED", reason)
        self._whole.end(status, reason)
        if line := self._whole.close(0.0 if killed else TOLD_WITHIN, hand_over=killed):
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
