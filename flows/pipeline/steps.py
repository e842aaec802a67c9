"""Submission of the stages' tasks, each as soon as its inputs are made.

A stage whose inputs failed is not submitted. Prefect would otherwise report each as NotReady, ahead of the failure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prefect import Task, allow_failure
from prefect.futures import PrefectFuture, as_completed

from tasks.run.stage_run import StageRun

Input = Any  # a Step, allow_failure(Step), or None


@dataclass(eq=False)
class Step:
    """A stage's task, with the steps that make its inputs and those that it waits for."""

    task: Task
    stage_run: StageRun
    inputs: tuple[Input, ...]
    wait_for: tuple[Input, ...]
    future: PrefectFuture | None = None
    has_ended: bool = False

    @property
    def is_ready(self) -> bool:
        return all(_allows(one) for one in (*self.inputs, *self.wait_for))

    def submit(self) -> None:
        inputs, wait_for = ([*map(_future, these)] for these in (self.inputs, self.wait_for))
        self.future = self.task.submit(self.stage_run, *inputs, wait_for=wait_for)


@dataclass
class Steps:
    """The steps of a run, in order."""

    all: list[Step] = field(default_factory=list)

    def add(self, task: Task, stage_run: StageRun, *inputs: Input, wait_for: Any = None) -> Step:
        step = Step(task, stage_run, inputs, tuple(wait_for or ()))
        self.all.append(step)
        return step

    def run(self) -> Iterator[Step]:
        """Submit every step that can start, until none is left. Yields each step that has ended."""
        while True:
            for step in self.all:
                if step.future is None and step.is_ready:
                    step.submit()
            running = {step.future: step for step in self.all if step.future and not step.has_ended}
            if not running:
                return
            future = next(as_completed([*running]))
            future.wait()  # its state is known from now on
            running[future].has_ended = True
            yield running[future]


def _allows(one: Input) -> bool:
    """Whether a step that has this input can start."""
    if one is None:
        return True
    step = one.unwrap() if isinstance(one, allow_failure) else one
    return step.has_ended and (step is not one or step.future.state.is_completed())


def _future(one: Input) -> Any:
    if isinstance(one, allow_failure):
        return allow_failure(one.unwrap().future)
    return one.future if one else None
