"""Jobs of a gang: the command of the trainer that its hosts run, the hosts that it wants, and how far it is."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.planner import hardware
from conf.schema.run import Run
from contract import host_gpus
from tasks.gang.messages import Task


@dataclass(frozen=True)
class Job:
    """Training of a run, or evaluation of one of its models."""

    command: str  # of the trainer
    run: Run  # as the engines read it: its layout has the hosts that the job wants, and their GPUs
    conf: Run | None = None  # what the command reads, where that is another

    def task(self, run: Run) -> Task:
        """Message for the members of an attempt, whose hosts are those of `run`."""
        each = run.layout.gpus_per_node
        return Task(self.command, run.layout.nodes, each, each if self.command == "train" else 1)

    def newest(self) -> int:
        """Step of the newest checkpoint, which the next attempt goes on from. An evaluation begins again."""
        return _newest(Path(self.run.paths.output)) if self.command == "train" else 0

    @property
    def advice(self) -> str:
        """Keys that give more memory. The plan knows better ones for a training: empty."""
        keys = "evaluate.nodes, evaluate.gpus and evaluate.quantization"
        return "" if self.command == "train" else f"{keys} decide what a GPU has to hold"

    def is_over(self, states: Sequence[str]) -> bool:
        """Whether the attempt is over in order, by the states of its members. The first one has the answers."""
        return all(state == "done" for state in (states if self.command == "train" else states[:1]))

    def is_done(self) -> bool:
        """Whether all of it is made, once an attempt is over in order."""
        if self.command == "train":
            return self.newest() >= min(self.run.train.steps, self.run.train.stop_after or self.run.train.steps)
        return (Path(self.run.paths.evaluation) / "results.json").exists()


def training(run: Run) -> Job:
    return Job("train", run)


def evaluation(run: Run) -> Job | None:
    """Evaluation on hosts of its own, of which it takes all or none; None where the flow's own host evaluates."""
    asked, nodes = run.evaluate, run.evaluate.nodes or 1
    if nodes == 1 and asked.engine is None and not _is_away(run):
        return None
    gpus = asked.gpus or run.layout.gpus_per_node
    layout = run.layout.model_copy(update={"nodes": nodes, "gpus_per_node": gpus})
    where = {"engine": asked.engine or run.gang.engine, "pool": asked.pool or run.gang.pool}
    gang = run.gang.model_copy(update={**where, "min_nodes": None})
    return Job("evaluate", run.model_copy(update={"layout": layout, "gang": gang}), run)


def _is_away(run: Run) -> bool:
    """Whether hosts of a gang have the GPUs of this run, and this host has none."""
    return run.gang.engine != "local" and hardware.of(run).cuda and not host_gpus.visible()


def _newest(output: Path) -> int:
    """Step of the newest checkpoint that is marked complete (contract/checkpoints.py); 0 where there is none."""
    steps = [0]
    for mark in output.glob("checkpoints/iter_*/complete.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            files = json.loads(mark.read_text())["files"]
            if all((mark.parent / name).stat().st_size == size for name, size in files.items()):
                steps.append(int(mark.parent.name.removeprefix("iter_")))
    return max(steps)
