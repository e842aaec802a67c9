"""python -m flows.plan --rehearse: Megatron's own verdict joins the plan's, in words, in JSON and in the exit code."""

import json

import pytest

from contract.faults import Fault
from flows import plan
from tasks.run import launch


def test_megatron_s_answer_joins_the_plan(capsys):
    assert plan.main(["tiny", "--rehearse", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["rehearsal"]
    assert shown["equal"] and shown["text"][-1] == "equal: 1 of 1 ranks built and counted"
    (one,) = shown["ranks"]
    assert one["found"]["optimizer"] == one["planned"]["optimizer"] == 8 * one["found"]["trained_dense"] > 0


@pytest.mark.slow
def test_both_refuse_in_their_own_words(capsys):
    assert plan.main(["qwen3-235b-as-documented", "--rehearse"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert any("layout.pp: etp 4 * ep 4 * pp 8 = 128 does not divide the 32" in line for line in said)
    assert said[-1].startswith("refused by Megatron: world_size (32) is not divisible by ")


@pytest.mark.parametrize(
    "asked, line",
    [
        (["--steps", "2"], "--steps: 2: from 0, and of --rehearse"),
        (["--rehearse", "--steps=-1"], "--steps: -1: from 0, and of --rehearse"),
        (["--rehearse", "--gpus", "8"], "--rehearse: is of one layout, and --gpus of many"),
    ],
)
def test_faulty_calls(capsys, asked, line):
    assert plan.main(["tiny", *asked]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_fault_and_a_failure_of_the_process(capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise Fault("--steps: there is no tiny model of it")

    monkeypatch.setattr(launch, "process", refuse)
    assert plan.main(["tiny", "--rehearse", "--steps", "1"]) == 2
    assert capsys.readouterr().err == "error: --steps: there is no tiny model of it\n"

    def crash(*arguments, **options):
        raise launch.Broken("trainer.rehearse failed with code 1; its last lines:\nkilled")

    monkeypatch.setattr(launch, "process", crash)
    assert plan.main(["tiny", "--rehearse"]) == 1
    assert capsys.readouterr().err.endswith("error: killed\n")
