"""flows/pipeline.py: the one table of stages, its loop, and docs/reference/pipeline.md."""

import inspect
import re
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import get_args

import pytest
from prefect import allow_failure
from prefect.states import Completed, Failed

from conf.load import load
from conf.schema import bearing
from flows import pipeline
from flows.pipeline import PIPELINE
from tasks.run.artifact import Stage
from tasks.run.steps import makers
from tasks.stages import promote

PAGE = (Path(__file__).parents[2] / "docs/reference/pipeline.md").read_text()
OF_TINY = [
    name
    for name in PIPELINE.names
    if name not in ("prepare-prompts", "pack", "download-teacher", "convert-teacher", "reference", "reinforce")
]
WITHOUT = ["download", "prepare", "convert", "train", "export"]


REINFORCED = ["reinforce.steps=3", "reinforce.max_tokens=8", "reinforce.source=tiny://tickets"]
COMPARED = ["train.objective=dpo", "data.source=tiny://ranked-tickets"]
PACKED = ["evaluate.adapter=packed", "model.base=int4", "convert.to=packed", "train.precision=bf16"]
TAUGHT = ["train.objective=distill", "train.teacher=tiny://llama"]


def asked(*overrides: str, last: str | None = None) -> list[str]:
    unasked = PIPELINE.unasked(load("tiny", overrides), last)
    return [name for name in OF_TINY if name not in unasked]


def test_all_stages_up_to_the_last_are_asked_for():
    assert asked() == OF_TINY
    assert asked(last="evaluate-base") == OF_TINY[:4]


def test_without_questions_nothing_is_evaluated_and_nothing_promoted():
    empty = "evaluate.tasks=[]"
    assert asked(empty) == WITHOUT and asked(empty, last="train") == WITHOUT[:4]
    assert PIPELINE.unasked(load("tiny", [empty]), "train") == {
        **dict.fromkeys(("evaluate-base", "evaluate-tuned", "promote"), "evaluate.tasks is empty"),
        "export": "comes after train",
    }
    some = Stage("export", 1, {}, {})
    assert promote.stage(load("tiny", [empty]), some, some, some).name == "promote"  # its metric is of no task


def test_from_a_stage_on_all_is_made_again():
    assert PIPELINE.request(load("tiny"), first="export").again == {"export", "evaluate-tuned", "promote"}
    assert not PIPELINE.request(load("tiny")).again


@pytest.mark.parametrize("keys", [REINFORCED, COMPARED, TAUGHT, PACKED])
def test_a_stage_is_made_from_its_inputs(keys):
    stages = PIPELINE.stages(load("tiny", keys))
    for step in (step for step in PIPELINE.steps if step.name in stages):
        inputs = {name: stages[maker].fingerprint for name, maker in makers(step.inputs, stages).items()}
        if step.name == "evaluate-tuned" and keys != PACKED:
            del inputs["before"]  # counts only if serving rounds weights
        assert stages[step.name].inputs == inputs
        made = {*makers(step.inputs, stages).values()}
        others = {maker for name in made for maker in makers(known(name), stages).values()}
        assert {*makers(step.reads, stages).values()} <= made | others  # its fingerprint covers them


def known(name: str) -> dict:
    """Inputs of a stage, and what it reads."""
    (step,) = (step for step in PIPELINE.steps if step.name == name)
    return {**step.inputs, **step.reads}


def test_inputs_are_parameters_of_both_functions():
    for step in PIPELINE.steps:
        parameters = {*inspect.signature(step.task.fn).parameters} - {"stage_run"}
        assert parameters == {*step.inputs, *step.reads} | (parameters & OPTIONAL[step.module.__name__.split(".")[2]])
        assert {*step.inputs, *step.options, "run"} >= required(step.module.stage)
        assert {*step.inputs, *step.options, "run"} <= {*inspect.signature(step.module.stage).parameters}


OPTIONAL = {step.module.__name__.split(".")[2]: set[str]() for step in PIPELINE.steps}
OPTIONAL |= {"evaluate": {"trained", "before", "released"}}


def required(function) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.default is inspect.Parameter.empty}


def test_a_key_can_bear_on_each_stage():
    runs = (load("tiny", keys) for keys in (REINFORCED, COMPARED, PACKED))
    names = {stage.name for run in runs for stage in PIPELINE.stages(run).values()}
    assert names | {"source"} == {*get_args(bearing.Stage)}


def test_the_reference_is_asked_once_for_all_trainings_on_the_same_rows():
    one, other = (PIPELINE.stages(load("tiny", [*COMPARED, *keys])) for keys in ([], ["train.dpo_beta=0.3"]))
    assert one["reference"].fingerprint == other["reference"].fingerprint
    assert one["train"].fingerprint != other["train"].fingerprint
    assert "reference" not in PIPELINE.stages(load("tiny"))


class Loop:
    """The loop with toys for tasks. A future has ended when somebody waits for it."""

    def __init__(self, monkeypatch, *keys: str, failing: tuple[str, ...] = (), earlier: dict[str, bool] | None = None):
        self.submitted: dict[str, dict] = {}
        self.ended: list[str] = []
        self.failing = failing
        monkeypatch.setattr(pipeline.Step, "task", property(lambda step: SimpleNamespace(submit=self.submit)))
        pipeline.run_stages(
            SimpleNamespace(  # type: ignore[arg-type]
                request=PIPELINE.request(load("tiny", keys)),
                stage=lambda step: step.name,
                earlier=lambda step: earlier or {} if step.after else {},
                has_ended=self.ended.append,
            )
        )

    def submit(self, stage: str, wait_for, **inputs):
        self.submitted[stage] = {name: made_by(one) for name, one in inputs.items()}
        if wait_for:
            self.submitted[stage]["after"] = [made_by(one) for one in wait_for]
        return Future(stage, Failed() if stage in self.failing else Completed())


class Future:
    def __init__(self, stage: str, state):
        self.stage, self.state = stage, state

    def wait(self) -> None:
        pass

    def add_done_callback(self, call) -> None:
        call(self)


def made_by(future) -> str:
    return future.unwrap().stage if isinstance(future, allow_failure) else future.stage


@pytest.mark.parametrize("keys", [(), REINFORCED, COMPARED, TAUGHT, PACKED])
def test_each_task_gets_the_artifacts_of_its_inputs(monkeypatch, keys):
    loop = Loop(monkeypatch, *keys)
    stages = PIPELINE.stages(load("tiny", keys))
    assert {*loop.submitted} == {*stages} == {*loop.ended}
    for name, given in loop.submitted.items():
        assert given == makers(known(name), stages)


@pytest.mark.parametrize(
    ("failing", "missing"),
    [
        ("download", {*OF_TINY[1:]}),
        ("prepare", {"evaluate-base", "train", "export", "evaluate-tuned", "promote"}),
        ("evaluate-base", {"promote"}),
        ("train", {"export", "evaluate-tuned", "promote"}),
    ],
)
def test_nothing_that_follows_from_a_failure_is_submitted(monkeypatch, failing, missing):
    assert {*OF_TINY} - {*Loop(monkeypatch, failing=(failing,)).submitted} == missing


@pytest.mark.parametrize("required", [True, False])
def test_training_waits_for_the_base_and_needs_it_if_it_is_required(monkeypatch, required):
    loop = Loop(monkeypatch, earlier={"evaluate-base": required})
    assert loop.submitted["train"]["after"] == ["evaluate-base"]
    assert loop.ended.index("train") > loop.ended.index("evaluate-base")
    loop = Loop(monkeypatch, failing=("evaluate-base",), earlier={"evaluate-base": required})
    assert ("train" in loop.submitted) != required


def test_a_stage_that_has_gpus_waits_for_its_turn():
    for step in PIPELINE.steps:
        source = inspect.getsource(step.module)
        assert ("run_job(" in source or "learn(" in source) == step.gpus, step.name


def test_the_page_has_these_stages():
    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+ \| (yes|no) \|", PAGE, re.MULTILINE)
    assert rows == [(step.name.replace("-", " "), "yes" if step.gpus else "no") for step in PIPELINE.steps]


def test_the_page_s_picture_has_the_inputs_of_each_stage():
    """Those that another input was made from may be left out."""
    names = {"before": "evaluate-base", "after": "evaluate-tuned", "prompts": "prepare-prompts"}
    names |= {"teacher": "download-teacher", "taught": "convert-teacher"}
    arrows: set[tuple[str, str]] = set()
    picture = PAGE.partition("```mermaid")[2].partition("```")[0]
    for line in picture.splitlines():
        stations = [re.sub(r"\[.*\]", "", station.strip()) for station in line.split("-->")]
        arrows |= {(names.get(a, a), names.get(b, b)) for a, b in pairwise(stations)}
    inputs = {
        (maker, step.name)
        for step in PIPELINE.steps
        for parameter, named in step.inputs.items()
        if parameter != step.may_fail
        for maker in ([named] if isinstance(named, str) else named)
    }
    assert arrows - inputs == {("plan", "download")}
    for maker, name in inputs - arrows:
        assert any((maker, between) in inputs and (between, name) in arrows for between in PIPELINE.names), (
            maker,
            name,
        )


class Signalled(BaseException):
    pass


def test_the_loop_notices_a_signal_that_the_system_delivers_to_another_thread():
    def handle(*_):
        raise Signalled

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        thread = threading.Timer(0.5, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
        thread.start()
        began = time.monotonic()
        with pytest.raises(Signalled):
            pipeline._first(SimpleQueue())
        assert time.monotonic() - began < 10
    finally:
        signal.signal(signal.SIGUSR1, before)
