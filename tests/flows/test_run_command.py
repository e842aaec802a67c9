"""flows/run_command.py: what is wrong with a command line is said in a line, before Prefect or a stage starts."""

import json
import sys
from types import SimpleNamespace

import pytest

from conf.load import FOLDER, load
from conf.overrides import as_overrides
from flows.pipeline import PIPELINE
from flows.run_command import command
from tasks.run import artifact
from tasks.run.artifact import Artifact
from tasks.servers import prefect_server
from tasks.sources.hub import api

TINY = (FOLDER / "tiny.yaml").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command line with a flow that only notes what it gets; returns code, errors, output."""
    monkeypatch.setenv("FINETUNE_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("FINETUNE_STORE", raising=False)
    monkeypatch.setattr(prefect_server, "use", lambda: None)
    calls: list[dict] = []

    def toy_flow(**parameters):
        calls.append(parameters)
        return SimpleNamespace(is_completed=lambda: True, is_failed=lambda: False, message=None)

    def run(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["finetune", *arguments])
        code = command(SimpleNamespace(name="finetune", with_options=lambda **_: toy_flow))
        said = capsys.readouterr()
        return code, said.err, said.out

    run.calls = calls  # pyright: ignore[reportFunctionMemberAccess]
    return run


def test_a_plain_run(run):
    assert run("tiny")[0] == 0
    assert run.calls == [{"conf": "tiny", "changes": {}, "from_stage": None, "until_stage": None, "return_state": True}]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (
            ["tiny", "optimizer.lrr=1"],
            "override optimizer.lrr=1: optimizer.lrr: unknown key; did you mean optimizer.lr?",
        ),
        (["tiny", "optimizer.lr=7"], "override optimizer.lr=7: optimizer.lr: 7 is too large: it must be at most 1"),
        (["tiny", "optimizer"], "override optimizer: not of the form key=value"),
        (["tiny", "paths.output=/tmp/x"], "paths.output: the flow sets all paths"),
        (["huge"], "no such configuration: huge; it is a file, or one of deepseek-v3-512, "),
        (
            ["tiny", "--until", "trian"],
            "trian: not a stage; the stages are download, prepare, prepare-prompts, convert",
        ),
        (["tiny", "--from", "publish"], "publish: not a stage; the stages are download"),
        (["tiny", "--from", "export", "--until", "train"], "from-stage export comes after until-stage train"),
        (["tiny", "data.source=tiny://x", "--dry-run"], "data.source: tiny://x: no such data"),
        (
            ["tiny", "layout.gpus_per_node=3", "layout.ep=3", "train.global_batch=48", "--dry-run"],
            "plan: layout.ep: 3 does not divide the 8 experts; nearest legal: 1. This fits on 3 cpu: layout.ep=1",
        ),
        (["tiny", "hardware.gpu=h1000", "--dry-run"], "hardware.gpu: 'h1000' is not one of a100, h100"),
        (["tiny", "model.source=tiny://bert", "--dry-run"], "model.source: tiny://bert: unknown model; known are "),
        (["tiny", "evaluate.tasks=[nowhere.yaml]", "--dry-run"], "evaluate.tasks: nowhere.yaml: no such file"),
        (
            ["tiny", "promote.model=a/b", "--dry-run"],
            "override promote.model=a/b: promote.model: a/b: MLflow's registry does not allow slashes",
        ),
    ],
)
def test_a_fault_is_a_line_and_nothing_starts(run, tmp_path, arguments, complaint):
    code, errors, output = run(*arguments)
    assert (code, output, run.calls) == (2, "", [])
    assert errors.startswith(f"error: {complaint}") and errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_all_faults_at_once(run):
    errors = run("tiny", "a.b=1", "train.steps=x")[1].splitlines()
    assert len(errors) == 2 and all(line.startswith("error: override ") for line in errors)


def test_a_store_that_is_none(run, monkeypatch):
    monkeypatch.setenv("FINETUNE_STORE", "ftp://user:secret@host/x")
    code, errors, _ = run("tiny", "--dry-run")
    assert code == 2 and errors.startswith("error: store: ") and "secret" not in errors


@pytest.mark.parametrize(
    "overrides", [["optimizer.lr=1e-4", "data.rows=null"], ["name=other", "data.template='{input}: {output}'"]]
)
def test_what_the_flow_gets_is_what_was_checked(run, tmp_path, overrides):
    """1e-4 is not a text, a null is a value, and both hold for a file outside of conf/ as well."""
    outside = tmp_path / "mine.yaml"
    outside.write_text(TINY.replace("source: tiny://tickets", "source: tiny://tickets\n  rows: 99"))
    for conf in ("tiny", str(outside)):
        code, errors, _ = run(conf, *overrides)
        assert (code, errors) == (0, "")
        call = run.calls[-1]
        wanted = load(conf, overrides)
        assert load(call["conf"], as_overrides(call["changes"])) == wanted


def test_options_may_stand_anywhere(run):
    assert run("--from", "train", "tiny", "train.steps=7", "--until-stage", "export", "log.every=2")[0] == 0
    assert run.calls[0]["changes"] == {"train": {"steps": 7}, "log": {"every": 2}}
    assert (run.calls[0]["from_stage"], run.calls[0]["until_stage"]) == ("train", "export")


NEEDED = ["download", "convert", "prepare", "evaluate-base", "train", "export", "evaluate-tuned"]


def test_a_dry_run_names_every_stage_and_starts_none(run, tmp_path):
    outside = tmp_path / "mine.yaml"
    outside.write_text(TINY)
    code, errors, output = run(str(outside), "--dry-run")
    assert (code, errors, run.calls) == (0, "", [])
    stages, table, (planned,) = (part.splitlines() for part in output.split("\n\n"))
    *lines, cost = stages
    assert [line.split()[0] for line in table[1:-1]] == NEEDED
    asked = [
        name
        for name in PIPELINE.names
        if name not in ("prepare-prompts", "download-teacher", "convert-teacher", "pack", "reference", "reinforce")
    ]
    assert [line.split()[0] for line in lines] == asked
    assert all(" miss " in line and "exists yet" in line for line in lines)
    assert cost.startswith("known cost: 0:00") and planned.startswith("plan  legal and fits: stage 0, ")
    assert run("tiny", "--dry-run", "--until", "convert")[2].count("\n") == 12
    assert run("tiny", "--dry-run")[2] == output  # the same run from another file


def test_a_dry_run_without_a_way_to_the_hub_tells_what_is_known_of_the_model(run, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(api, "WAITS", (0, 0, 0, 0))
    code, errors, output = run("deepseek-v3-64", "--dry-run")
    assert (code, errors) == (0, "")
    stages, table, _, (planned,) = (part.splitlines() for part in output.split("\n\n"))
    assert (
        stages[0].startswith("deepseek-ai/DeepSeek-V3-0324: http://127.0.0.1:9 cannot be reached") and len(stages) == 2
    )
    assert [line.split()[0] for line in table[1:8]] == NEEDED
    assert planned.startswith("plan  legal and fits: ")
    assert "convert" not in run("deepseek-v3-64", "--dry-run", "--until", "download")[2]
    code, errors, output = run("deepseek-v3-64", "model.source=org/nothing", "--dry-run")
    assert (code, output) == (2, "") and errors.startswith("error: org/nothing: http://127.0.0.1:9 cannot be reached")


def test_a_failed_run_shows_why_and_how(run, monkeypatch, capsys):
    ends = {"is_completed": lambda: False, "is_failed": lambda: True}
    state = SimpleNamespace(**ends, message="train: a\nexport: b", name="Failed")
    monkeypatch.setattr(sys, "argv", ["finetune", "tiny"])
    monkeypatch.setattr(prefect_server, "use", lambda: None)
    assert command(SimpleNamespace(name="finetune", with_options=lambda **_: lambda **_: state)) == 2
    assert capsys.readouterr().err == "error: train: a\nerror: export: b\n"


def test_ctrl_c_ends_in_a_line(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["finetune", "tiny"])
    monkeypatch.setattr(prefect_server, "use", lambda: None)
    assert command(SimpleNamespace(name="finetune", with_options=lambda **_: interrupted)) == 130
    assert capsys.readouterr().err.startswith("error: interrupted; results are kept")


@pytest.mark.parametrize(("row", "would"), [({"input": "a", "output": "b"}, 2), ({"chosen": "a", "rejected": "b"}, 0)])
def test_a_dry_run_refuses_rows_of_this_host_that_the_objective_does_not_learn_from(run, tmp_path, row, would):
    rows = tmp_path / "mine.jsonl"
    rows.write_text(f"{json.dumps(row | {'prompt': 'x'})}\n" * 2)
    code, errors, _ = run("tiny", "train.objective=dpo", f"data.source={rows}", "--dry-run")
    said = (
        f"error: train.objective: dpo reads rows with a chosen and a rejected answer, but {rows} contains rows with one"
    )
    assert code == would and errors.startswith(said if would else "")
    assert run("tiny", "train.objective=dpo", f"data.source={rows}", "--dry-run", "--until", "prepare")[0] == 0


def test_a_dry_run_refuses_data_that_are_prepared_and_not_what_the_objective_learns_from(run, monkeypatch, tmp_path):
    rows = tmp_path / "mine.jsonl"
    rows.write_text("{}\n")
    made = Artifact(SimpleNamespace(key="prepare/0123"), {}, {"kind": "preference"}, {})  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(artifact, "find", lambda stage, store: made)
    errors = run("tiny", f"data.source={rows}", "--dry-run")[1]
    assert errors.startswith(
        "error: train.objective: sft reads rows with one answer, or texts, but prepare/0123 contains"
    )
