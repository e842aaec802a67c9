"""flows/pipeline/steps.py: which tasks are submitted, and when."""

from types import SimpleNamespace

import pytest
from prefect import allow_failure
from prefect.states import Completed, Failed

from flows.pipeline import steps as module
from flows.pipeline.steps import Steps


class Task:
    """A task whose future has ended when somebody waits for it."""

    def __init__(self, name: str, submitted: list, fails: bool = False):
        self.name, self.submitted, self.fails = name, submitted, fails

    def submit(self, stage_run, *inputs, wait_for):
        self.submitted.append((self.name, [name_of(one) for one in (*inputs, *wait_for)]))
        return Future(self)


class Future:
    def __init__(self, task: Task):
        self.task, self.state = task, Failed() if task.fails else Completed()

    def wait(self):
        pass


def name_of(one) -> str | None:
    future = one.unwrap() if isinstance(one, allow_failure) else one
    return future and future.task.name


@pytest.fixture
def run(monkeypatch):
    """run(*names that fail) -> submitted tasks with their inputs, and names of the steps in the order of their ends."""
    monkeypatch.setattr(module, "as_completed", iter)

    def run(*failing: str) -> tuple[list, list[str]]:
        submitted: list = []
        task = {name: Task(name, submitted, name in failing) for name in ("model", "data", "base", "train", "promote")}
        steps, stage = Steps(), SimpleNamespace()
        model = steps.add(task["model"], stage)
        data = steps.add(task["data"], stage, model, None)
        base = steps.add(task["base"], stage, model)
        train = steps.add(task["train"], stage, data, wait_for=[allow_failure(base)])
        steps.add(task["promote"], stage, train, base)
        return submitted, [step.task.name for step in steps.run()]

    return run


def test_each_is_submitted_once_its_inputs_are_made(run):
    submitted, ended = run()
    assert submitted == [
        ("model", []),
        ("data", ["model", None]),
        ("base", ["model"]),
        ("train", ["data", "base"]),
        ("promote", ["train", "base"]),
    ]
    assert ended == ["model", "data", "base", "train", "promote"]


def test_nothing_that_follows_from_a_failure_is_submitted(run):
    assert run("model") == ([("model", [])], ["model"])
    assert [name for name, _ in run("data")[0]] == ["model", "data", "base"]


def test_a_failure_that_is_allowed_stops_only_what_needs_it(run):
    assert run("base")[1] == ["model", "data", "base", "train"]
