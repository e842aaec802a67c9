"""Jobs of a gang: the trainer's command that its hosts run, the hosts that it needs, and its progress."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from conf.rules import gpus, schedule
from conf.rules.reinforcement import as_training
from conf.schema.run import Run
from contract import checkpoints, signs_of_life
from contract.output_marks import JOURNAL, PARTIAL, REFERENCE
from tasks.gang.messages import Task


@dataclass(frozen=True)
class Job(ABC):
    """Work that several hosts do together."""

    run: Run  # for the engines: its layout has the hosts of the job and their GPUs

    command: ClassVar[str]  # of the trainer
    advice: ClassVar[str] = ""  # keys that give more memory, if the plan knows none
    stays: ClassVar[bool] = False  # its hosts may stay after a failure and continue at once
    followed: ClassVar[tuple[str, ...]] = ()  # files of its output that the flow reads while they grow

    @classmethod
    def of(cls, run: Run, share: gpus.Share) -> "Job":
        """The job of a run, on its share of hosts."""
        return cls(run if cls.stays else run.changed(gang={"spares": 0}))

    def conf(self, run: Run) -> Run:
        """The configuration for the command in an attempt on the hosts of `run`."""
        return run

    def trains(self, run: Run) -> Run:
        """The training on the hosts of `run`, whose layout must be legal and fit."""
        return run

    def task(self, run: Run) -> Task:
        """Message for the members of an attempt on the hosts of `run`."""
        each = run.layout.gpus_per_node
        return Task(self.command, run.layout.nodes, each, self.ranks(each))

    def ranks(self, gpus: int) -> int:
        """Ranks on a host with this number of GPUs."""
        return gpus

    def sharing(self) -> str:
        """The key that requires a folder of all hosts; empty if there is none."""
        return "FINETUNE_RUNS"

    @abstractmethod
    def newest(self) -> int:
        """Step of the newest checkpoint, from which the next attempt resumes."""

    def needed(self, run: Run) -> int:
        """Number of the first members that an attempt needs. It continues without any of the others."""
        return run.layout.nodes

    def is_over(self, run: Run, states: Sequence[str]) -> bool:
        """Whether the attempt has ended without a failure, from the states of its members in order."""
        return all(state == "done" for state in states[: self.needed(run)])

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the job is complete after an attempt that ended without a failure."""


@dataclass(frozen=True)
class Training(Job):
    command: ClassVar[str] = "train"
    stays: ClassVar[bool] = True
    followed: ClassVar[tuple[str, ...]] = ("metrics.jsonl", signs_of_life.JOURNAL)

    def sharing(self) -> str:
        needs = {"model.adapter": self.run.model.adapter, "export.every": self.run.export.every}
        return next((key for key, value in needs.items() if value is not None), "")

    def newest(self) -> int:
        return _newest(self.run.paths.output)

    def is_done(self) -> bool:
        step = self.newest()
        mark = checkpoints.read_mark(checkpoints.step_folder(Path(self.run.paths.output) / "checkpoints", step))
        return mark is not None and schedule.is_over(self.run, step, mark)


@dataclass(frozen=True)
class Conversion(Job):
    """Conversion on the hosts of training. Each attempt continues with the unfinished parts."""

    command: ClassVar[str] = "convert"
    advice: ClassVar[str] = "a process takes up to 3 GB; convert.hosts=one has at most 4 of them, on the flow's host"

    def task(self, run: Run) -> Task:
        return replace(super().task(run), gpus=0)

    def newest(self) -> int:
        """Number of parts that are finished."""
        base = Path(self.run.paths.base)
        return len([*(base.with_name(base.name + PARTIAL) / JOURNAL).glob("*.json")])

    def is_done(self) -> bool:
        return checkpoints.read_mark(Path(self.run.paths.base)) is not None


@dataclass(frozen=True)
class Reference(Job):
    """Another model's log-probabilities of the rows, on the hosts of training. Each attempt continues with the rest."""

    command: ClassVar[str] = "reference"

    def newest(self) -> int:
        """Number of parts that are written."""
        return len([*(Path(self.run.paths.reference) / JOURNAL).glob("*.npz")])

    def is_done(self) -> bool:
        return (Path(self.run.paths.reference) / REFERENCE.mark).exists()


@dataclass(frozen=True)
class Evaluation(Job):
    """Evaluation of a model. It starts again in each attempt, and its first member has the answers."""

    asked: Run  # with the layout of training

    command: ClassVar[str] = "evaluate"
    followed: ClassVar[tuple[str, ...]] = ("progress.jsonl",)
    advice: ClassVar[str] = "evaluate.nodes, evaluate.gpus and evaluate.quantization decide what a GPU has to hold"

    @classmethod
    def of(cls, run: Run, share: gpus.Share) -> Job:
        """The job takes all of its hosts or none."""
        gang = {"engine": share.engine, "pool": run.evaluate.pool or run.gang.pool, "min_nodes": None, "spares": 0}
        return cls(run.changed(layout={"nodes": share.hosts, "gpus_per_node": share.gpus}, gang=gang), run)

    def conf(self, run: Run) -> Run:
        return self.asked

    def sharing(self) -> str:
        return ""

    def is_over(self, run: Run, states: Sequence[str]) -> bool:
        return states[:1] == ["done"]

    def ranks(self, gpus: int) -> int:
        return 1

    def newest(self) -> int:
        return 0

    def is_done(self) -> bool:
        return (Path(self.run.paths.evaluation) / "results.json").exists()


@dataclass(frozen=True)
class Reinforcement(Job):
    """Training by the first members on answers of vLLM, which may have the other members."""

    asked: Run  # with the layout of training

    command: ClassVar[str] = "reinforce"
    advice: ClassVar[str] = "keys of layout and adapter decide what training holds; reinforce.hosts does not"

    @classmethod
    def of(cls, run: Run, share: gpus.Share) -> Job:
        """The job has the hosts of training and of vLLM. gang.min_nodes counts the hosts that train."""
        return cls(run.changed(layout={"nodes": share.hosts, "gpus_per_node": share.gpus}, gang={"spares": 0}), run)

    def conf(self, run: Run) -> Run:
        """The run on the hosts of `run`. If some are missing, vLLM loses hosts before training does."""
        layout, asked = self.asked.layout, self.asked.reinforce
        guests = min(asked.hosts, max(1, run.layout.nodes - layout.nodes))
        return self.asked.changed(layout={"nodes": run.layout.nodes - guests}, reinforce={"hosts": guests})

    def trains(self, run: Run) -> Run:
        return as_training(self.conf(run))

    def task(self, run: Run) -> Task:
        asked = self.conf(run)
        task = replace(super().task(run), nodes=asked.layout.nodes)
        if not asked.reinforce.hosts:
            return task
        return replace(task, helps="reinforcement.engines.guest", helpers=asked.reinforce.engines)

    def ranks(self, gpus: int) -> int:
        return self.asked.layout.gpus_per_node

    def needed(self, run: Run) -> int:
        return self.conf(run).layout.nodes

    def newest(self) -> int:
        return _newest(self.run.paths.reinforced)

    def is_done(self) -> bool:
        return self.newest() >= self.asked.reinforce.steps * self.asked.reinforce.updates


JOBS: dict[str, type[Job]] = {job.command: job for job in (Training, Conversion, Reference, Evaluation, Reinforcement)}


def job_of(command: str, run: Run, leaves: bool = False) -> Job | None:
    """The job of the hosts that run this command of the trainer; None if the flow's host runs it.

    `leaves` means that the run needs GPUs and the flow's host has none: an evaluation then runs elsewhere.
    """
    share = gpus.takes(run, command, leaves)
    return JOBS[command].of(run, share) if share.engine else None


def _newest(output: str) -> int:
    """Step of the newest complete checkpoint; 0 if there is none."""
    return max(checkpoints.complete_steps(Path(output) / "checkpoints"), default=0)
