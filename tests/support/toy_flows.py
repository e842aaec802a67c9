"""Flows with toys in place of the trainer's commands, forked from a process that has a flow's imports."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from flows.pipeline import PIPELINE
from tests.support import toy_trainer
from tests.support.flow_world import CONF, World
from tests.support.preloaded import Preloaded, Started

LONG = 180.0  # seconds, on a busy machine
ON_GPUS = ("evaluate-base", "train", "evaluate-tuned")


@dataclass(frozen=True)
class Toys:
    """A folder with toys, and a host with or without a GPU."""

    place: World
    fork: Preloaded
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)  # beside the place's
    started: list[Started] = field(default_factory=list)

    def start(self, name: str, *arguments: str, beside: str = "", **fates: str) -> Started:
        """Start a flow, whose store is its own or that of the one beside which it runs."""
        toy = json.dumps({stage.replace("_", "-"): fate for stage, fate in fates.items()})
        home = self.folder / (beside or name)
        own = {"TOY": toy, "FINETUNE_RUNS": str(home), "FINETUNE_STORE": str(home / "store")}
        conf = self.folder / "toys.yaml"
        conf.write_text(CONF.replace("name: quick", "name: toys"))
        said = self.folder / f"{name}.txt"
        environment = self.environment | own
        self.started.append(
            self.fork.start("flows.finetune", conf, *arguments, output=said, cwd=self.folder, **environment)
        )
        return self.started[-1]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def run(self, name: str, *arguments: str, code: int = 0, **fates: str) -> str:
        process = self.start(name, *arguments, **fates)
        assert process.wait(LONG) == code, self.said(name)
        return self.said(name)

    def spans(self) -> dict[str, list[tuple[float, float]]]:
        """Beginnings and ends by stage, in order."""
        found: dict[str, list] = {}
        for name, what, at in toy_trainer.events(self.folder):
            if what == "begins":
                found.setdefault(name, []).append((at, float("inf")))
            else:
                found[name][-1] = (found[name][-1][0], at)
        return found

    def begun(self, name: str) -> bool:
        return name in self.spans()

    def together(self) -> set[tuple[str, str]]:
        """Stages for GPUs that ran at one time, by name."""
        spans = [(begin, end, name) for name in ON_GPUS for begin, end in self.spans().get(name, [])]
        both = [(a[2], b[2]) for a in spans for b in spans if a < b and b[0] < a[1]]
        return {(min(pair), max(pair)) for pair in both}

    def mlflow(self, flow: str) -> dict[str, tuple[str, str]]:
        """Status and reason of MLflow's runs of a flow run, by stage; "" is the flow's own."""
        from mlflow import MlflowClient

        client = MlflowClient(self.place.mlflow)
        parents = client.search_runs(["1"], f"tags.`mlflow.runName` = '{flow}'")
        if not parents:
            return {}
        parent = parents[0]
        runs = [parent, *client.search_runs(["1"], f"tags.finetune.parent = '{parent.info.run_id}'")]
        found = {
            run.data.tags.get("finetune.stage", ""): (run.info.status, run.data.tags.get("finetune.reason", ""))
            for run in runs
        }
        tags = parent.data.tags
        for stage in PIPELINE.names:  # those without a run of their own
            if f"finetune.{stage}.begun" in tags:
                state = tags.get(f"finetune.{stage}.state", parent.info.status)
                found[stage] = (state, tags.get(f"finetune.{stage}.reason", tags.get("finetune.reason", "")))
        return found
