"""Predicted time of a training by category, from a rate of failures: what tasks/gang/history/spent.py then measures.

A failure ends an attempt of all hosts. It costs the steps since the last checkpoint, half an interval on average, and a
new start. Waiting for hosts is not predicted, nor are the copies of a save in the background (checkpoint.background):
training waits only for the last one. A save is written at the rate of the hosts' storage.
"""

from dataclasses import dataclass
from math import ceil

from conf.model_facts import ModelFacts
from conf.planner.serving.duration import READ
from conf.planner.stage_needs import START, checkpoint_bytes, load, packing_cost
from conf.planner.timing import Timing
from conf.rules import schedule
from conf.schema.run import Run


@dataclass(frozen=True)
class Goodput:
    failures: float  # expected until the end of the training
    seconds: dict[str, float]  # by category

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @property
    def effective(self) -> float:
        """Share of the time of steps that no failure undoes."""
        return self.seconds["training"] / self.whole


def goodput(run: Run, facts: ModelFacts, time: Timing, steps: int) -> Goodput:
    """Return the predicted time of a training of so many steps."""
    trained, saves = steps * time.likely, schedule.saved(run)
    save = checkpoint_bytes(run, facts) / (READ * run.layout.nodes)
    forward = time.likely / 3  # of a batch
    seconds = {
        "training": trained,
        "saving": (1 if run.checkpoint.background else saves) * save,
        "evaluating": _validations(run, steps) * run.train.validate_batches * forward + packing_cost(run, facts),
    }
    start = START + load(run, facts)
    failures = sum(seconds.values()) / 3600 * run.layout.world / run.hardware.mtbf
    seconds |= {"starting": (1 + failures) * START, "loading": (1 + failures) * (start - START)}
    seconds["lost"] = failures * (trained / saves / 2 + run.gang.silent_after)
    return Goodput(failures, seconds)


def _validations(run: Run, steps: int) -> int:
    every = run.train.validate_every
    if every == "epoch":
        return ceil(run.train.epochs or 1)
    if not every:
        return 0
    return ceil(1 / every) if isinstance(every, float) else steps // every
