"""Sink that mirrors the followed metrics of a journal to Weights & Biases: a run per followed stage, metrics by step.

wandb reads the destination of runs from its environment (WANDB_MODE=offline for none). A run is continued by its id;
steps that wandb already has are not sent again. In offline mode they are unknown: after a crash some steps are sent
twice, with the same values, and the service keeps one of them when it synchronizes.
"""

import re
from itertools import groupby
from pathlib import Path

import wandb

from tasks.tracking.outages import Away, line_of


class WandbSink:
    def __init__(self, project: str, folder: Path):
        self.project, self.folder = project, folder
        self.runs: dict[str, wandb.Run] = {}
        self.begun: dict[str, dict] = {}

    def take(self, events: list[dict], runs: dict, attempt: str) -> int:
        event = events[0]
        try:
            if event.get("do") == "begin":
                runs[event["run"]] = event["id"]
                self.begun[event["run"]] = event
            elif event.get("do") == "log" and event.get("axis") == "step":
                self._log(event, runs)
            elif event.get("do") == "end" and event["run"] in self.runs:
                self.runs.pop(event["run"]).finish(exit_code=int(event["status"] != "FINISHED"))
        except Exception as error:
            raise Away(f"Weights & Biases: {line_of(error)}") from None
        return 1

    def _log(self, event: dict, runs: dict) -> None:
        run = self._open(event["run"], runs)
        for step, rows in groupby(event["metrics"], key=lambda row: row[3]):
            if step >= run.step:
                run.log({key: value for key, value, _, _ in rows}, step=step)

    def _open(self, name: str, runs: dict) -> "wandb.Run":
        if name not in self.runs:
            begun = self.begun.get(name, {"name": name, "flow": None})
            self.runs[name] = wandb.init(
                project=self.project,
                id=re.sub(r"[^\w-]", "-", runs[name]),
                name=begun["name"],
                group=begun["flow"],
                resume="allow",
                reinit="create_new",
                dir=self.folder,
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True),
            )
        return self.runs[name]
