"""trainer/rehearsal/best_layouts.py: what is tried of a plan, and how the fastest is named."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.load import load, replaced
from conf.model_facts import facts_from_hf
from conf.planner import hardware
from conf.planner.verdict import config_of, settle
from contract.faults import Fault
from trainer.rehearsal.best_layouts import Candidate, Row, candidates, line, measured, verdict

ANSWER = {"out_of_memory": None, "ranks": []}
ROOT = Path(__file__).resolve().parents[3]


def plans(best: int, *overrides: str) -> list[Candidate]:
    run = load("tiny", ("layout.gpus_per_node=2", "train.global_batch=4", *overrides), illegal=True)
    facts, gpu = facts_from_hf(config_of(run)[0]), hardware.of(run)
    return candidates(run, settle(run, facts, gpu), facts, gpu, best)


def test_the_configuration_s_own_layout_comes_first_and_each_other_is_one_of_the_plan():
    own, *others = plans(3, "train.micro_batch=1", "layout.tp=2", "layout.sp=true")
    assert own.name.startswith("as configured: tp 2") and own.overrides == ""
    assert len(others) == 3 and all(one.overrides for one in others)
    assert [one.planned for one in others] == sorted(one.planned for one in others)
    given = ["layout.gpus_per_node=2", "train.global_batch=4", "train.micro_batch=1", "layout.tp=2", "layout.sp=true"]
    for one in others:  # a key that is set twice is refused
        load("tiny", replaced(given, one.overrides.split()))


def test_a_layout_that_is_illegal_is_left_out_and_others_are_not():
    assert all(one.overrides for one in plans(2))  # tiny's micro batch of 16 is more than a rank's share


def test_beside_the_layout_that_auto_takes_others_are_written_out_whole():
    own, other = plans(1, "layout.auto=true")
    assert own.overrides == "" and own.name.removeprefix("as configured: ") != other.name
    assert "layout.auto=false" in other.overrides.split()


def test_several_hosts_are_refused():
    with pytest.raises(Fault, match="--best: 2 hosts, but trials use one"):
        plans(1, "layout.nodes=2", "train.micro_batch=1")


@pytest.mark.parametrize(
    "stdout, stderr, text",
    [
        (json.dumps(ANSWER | {"out_of_memory": {"rank": 0}}), "", "x: out of memory"),
        ("", "warning\nerror: layout.tp: 3\nand more", "x: error: layout.tp: 3"),
        ("", "", "x: exit code 1"),
        (
            json.dumps(ANSWER | {"ranks": [{"measured": {"seconds": s}, "planned": {"seconds": 1}} for s in (1, 2)]}),
            "",
            "x: 2,000 / 1,000 = 2.00 ms",
        ),
    ],
)
def test_what_became_of_a_trial_is_one_line(monkeypatch, stdout, stderr, text):
    done = SimpleNamespace(stdout=stdout, stderr=stderr, returncode=1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert line(measured(Candidate("x", "", 1.0), "tiny", [], [])) == text


def test_the_fastest_is_named_with_its_keys():
    own, other = Candidate("as configured: a", "", 1.0), Candidate("b", "layout.tp=2", 0.5)
    assert verdict([Row(own, 2.0), Row(other, 1.0)], "x", ["layout.tp=4", "train.steps=3"]) == (
        "the fastest is b, 2.00 times as fast as x unchanged:\n    python -m flows.finetune x train.steps=3 layout.tp=2"
    )
    assert verdict([Row(own, 2.0), Row(other, failed="out of memory")], "x", []) == "the fastest is x unchanged"
    assert verdict([Row(own, failed="y")], "x", []) == "no trial succeeded"


@pytest.mark.slow
def test_command(tmp_path):
    cut = ("layout.gpus_per_node=2", "train.global_batch=4", "train.micro_batch=1")
    command = [sys.executable, "-m", "trainer.trial", "tiny", "--best", "1", "--steps", "3", "--json", *cut]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FINETUNE_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 2 and all(row["seconds"] > 0 for row in rows)
    (kept,) = tmp_path.glob("runs/best-tiny-*.json")
    assert json.loads(kept.read_text()) == rows
