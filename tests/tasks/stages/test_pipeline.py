"""tasks/stages/pipeline.py: the one list of stages, to which the flow and docs/reference/pipeline.md are held."""

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from conf.load import load
from conf.schema import bearing
from flows.pipeline import every_stage
from tasks.run.artifact import Stage
from tasks.stages import pipeline, promote
from tasks.stages.pipeline import ORDER, PIPELINE

PAGE = (Path(__file__).parents[3] / "docs/reference/pipeline.md").read_text()
FLOW = inspect.getsource(every_stage)
OF_TINY = [
    name
    for name in ORDER
    if name not in ("prepare-prompts", "download-teacher", "convert-teacher", "reference", "reinforce")
]
WITHOUT = ["download", "prepare", "convert", "train", "export"]


REINFORCED = ["reinforce.steps=3", "reinforce.max_tokens=8", "reinforce.source=tiny://tickets"]
COMPARED = ["train.objective=dpo", "data.source=tiny://ranked-tickets"]
TAUGHT = ["train.objective=distill", "train.teacher=tiny://llama"]


def asked(*overrides: str, last: str | None = None) -> list[str]:
    unasked = pipeline.unasked(load("tiny", overrides), last)
    return [name for name in OF_TINY if name not in unasked]


def test_all_stages_up_to_the_last_are_asked_for():
    assert asked() == OF_TINY
    assert asked(last="evaluate-base") == OF_TINY[:4]


def test_without_questions_nothing_is_evaluated_and_nothing_promoted():
    empty = "evaluate.tasks=[]"
    assert asked(empty) == WITHOUT and asked(empty, last="train") == WITHOUT[:4]
    assert pipeline.unasked(load("tiny", [empty]), "train") == {
        **dict.fromkeys(("evaluate-base", "evaluate-tuned", "promote"), "evaluate.tasks is empty"),
        "export": "lies behind the last stage that was asked for",
    }
    some = Stage("export", 1, {}, {})
    assert promote.stage(load("tiny", [empty]), some, some, some).name == "promote"  # its metric is of no task


def test_from_a_stage_on_all_is_made_again():
    assert pipeline.request(load("tiny"), first="export").again == {"export", "evaluate-tuned", "promote"}
    assert not pipeline.request(load("tiny")).again


@pytest.mark.parametrize("keys", [REINFORCED, COMPARED, TAUGHT])
def test_a_stage_is_made_from_its_inputs(keys):
    stages = pipeline.stages(load("tiny", keys))
    for kind in (kind for kind in PIPELINE if kind.name in stages):
        there = {name: maker for name, maker in kind.where_there.items() if maker in stages}
        made_from = {name: stages[maker].fingerprint for name, maker in (kind.inputs | there).items()}
        assert stages[kind.name].inputs == made_from
        made = {*kind.inputs.values()}
        behind = made | {maker for name in made for maker in (kinds()[name].inputs | kinds()[name].read).values()}
        assert {*kind.read.values()} <= behind  # so that what it reads is known by its fingerprint


def test_a_key_can_bear_on_each_stage():
    names = {stage.name for keys in (REINFORCED, COMPARED) for stage in pipeline.stages(load("tiny", keys)).values()}
    assert names | {"source"} == {*get_args(bearing.Stage)}


def test_the_reference_is_asked_once_for_all_trainings_on_the_same_rows():
    one, other = (pipeline.stages(load("tiny", [*COMPARED, *keys])) for keys in ([], ["train.dpo_beta=0.3"]))
    assert one["reference"].fingerprint == other["reference"].fingerprint
    assert one["train"].fingerprint != other["train"].fingerprint
    assert "reference" not in pipeline.stages(load("tiny"))


def kinds() -> dict[str, pipeline.Kind]:
    return {kind.name: kind for kind in PIPELINE}


def calls(source: str) -> dict[str, dict[str, str]]:
    """The stages that a flow submits, in order; what each is given, by the name that its task has for it."""
    found: dict[str, dict[str, str]] = {}
    made_by: dict[str, str] = {}
    lines = [line for line in ast.walk(ast.parse(source)) if isinstance(line, ast.Assign | ast.Expr)]
    for line in sorted(lines, key=lambda line: line.lineno):
        if not ast.unparse(line.value).startswith("steps.add("):
            continue
        assert isinstance(line.value, ast.Call)
        task, *inputs = map(ast.unparse, line.value.args)
        signature = inspect.signature(getattr(every_stage, task).fn)
        given = signature.bind(*inputs).arguments
        name = given.pop("stage_run").removeprefix("session.stage('").removesuffix("')")
        assert task in (name.partition("-")[0], name.replace("-", "_"))
        taken = {key: re.sub(r"allow_failure\((\w+)\)", r"\1", variable) for key, variable in given.items()}
        found[name] = {key: made_by[variable] for key, variable in taken.items()}
        if isinstance(line, ast.Assign):
            made_by[ast.unparse(line.targets[0])] = name
    return found


def test_the_flow_makes_these_stages_from_these_inputs():
    assert calls(FLOW) == {kind.name: kind.inputs | kind.read | kind.also | kind.where_there for kind in PIPELINE}
    assert [*calls(FLOW)] == [*ORDER]


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ('session.stage("evaluate-base"), model, prompted)', 'session.stage("evaluate-base"), model, base)'),
        ('session.stage("promote"), tuned, before, after', 'session.stage("promote"), tuned, after, before'),
        (
            '        base = steps.add(convert, session.stage("convert"), model)',
            '        base = steps.add(download, session.stage("download"))',
        ),
    ],
)
def test_a_flow_that_makes_something_else_is_seen(line, other):
    assert FLOW.count(line) == 1
    assert calls(FLOW.replace(line, other)) != {
        kind.name: kind.inputs | kind.read | kind.also | kind.where_there for kind in PIPELINE
    }


def test_a_stage_that_has_gpus_waits_for_its_turn():
    for kind in PIPELINE:
        module = inspect.getmodule(kind.stage)
        assert module and ("stage_run.turn(" in inspect.getsource(module)) == kind.gpus, kind.name


def test_the_page_has_these_stages():
    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+ \| (yes|no) \|", PAGE, re.MULTILINE)
    assert rows == [(kind.name.replace("-", " "), "yes" if kind.gpus else "no") for kind in PIPELINE]


def test_the_page_s_picture_has_the_inputs_of_each_stage():
    """Those that another input was made from may be left out."""
    names = {"before": "evaluate-base", "after": "evaluate-tuned", "prompts": "prepare-prompts"}
    names |= {"teacher": "download-teacher", "taught": "convert-teacher"}
    arrows: set[tuple[str, str]] = set()
    picture = PAGE.partition("```mermaid")[2].partition("```")[0]
    for line in picture.splitlines():
        stations = [re.sub(r"\[.*\]", "", station.strip()) for station in line.split("-->")]
        arrows |= {(names.get(a, a), names.get(b, b)) for a, b in pairwise(stations)}
    inputs = {(maker, kind.name) for kind in PIPELINE for maker in [*kind.inputs.values(), *kind.where_there.values()]}
    assert arrows - inputs == {("plan", "download")}
    for maker, name in inputs - arrows:
        assert any((maker, between) in inputs and (between, name) in arrows for between in ORDER), (maker, name)
