"""docs/extending/: the pages for a reward, an objective, an engine and a key are followed with the code that they show.

tests/trainer/test_extending_pages.py trains with the objective and the metric.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from conf import rewards
from conf.load import load
from conf.rules import objectives
from contract.faults import ConfigError, Fault
from flows import gang, plan
from tasks.gang.board import Board
from tasks.gang.engines import Demand, engine_of
from tasks.store import open_store
from tests.support.extending_pages import ROOT, blocks, package

WITH_KEYS = "test_what_was_made_before_is_found_again or test_a_value_counts_in_the_stages_that_its_key_declares"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(page, *modules): a package of the page's code, until the test ends."""
    imported: list[str] = []

    def install(page: str, *modules: str) -> None:
        package(tmp_path, page, *modules)
        monkeypatch.syspath_prepend(tmp_path)
        imported.extend(modules)

    yield install
    for module in imported:
        sys.modules.pop(module, None)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load("tiny", [*overrides])
    return str(raised.value)


def test_an_objective_of_a_package_is_planned_and_checked(install, capsys):
    focal = "train.objective=focal"
    assert "train.objective: " in refusal(focal)
    install("objective", "focal", "focal_loss")
    run = load("tiny", [focal])
    assert objectives.of(run).figures == ("probability",) and not objectives.unfit(run, "data", "sft")
    assert "contains rows with a chosen and a rejected answer; use train.objective=dpo" in objectives.unfit(
        run, "data", "preference"
    )
    assert plan.main(["tiny", focal]) == 0 and "tiny" in capsys.readouterr().out
    assert "train.precision: fp16, but focal needs the probabilities of tokens" in refusal(
        focal, "train.precision=fp16"
    )
    assert "train.z_loss: 0.1, but train.objective focal has no z loss" in refusal(focal, "train.z_loss=0.1")
    assert "train.cuda_graphs: true, but only batches of train.objective sft" in refusal(
        focal, "train.cuda_graphs=true"
    )
    assert "log.noise_scale: does not support train.objective focal" in refusal(focal, "log.noise_scale=true")


def test_an_engine_of_a_package_is_planned_and_starts_members(install, tmp_path, monkeypatch, capsys):
    chosen = ["gang.engine=ssh", "layout.nodes=2", "train.micro_batch=8"]
    assert "gang.engine: " in refusal(*chosen)
    install("engine", "ssh_engine")
    assert plan.main(["tiny", *chosen]) == 0
    capsys.readouterr()
    assert gang.main(["tiny", *chosen[1:], "--engine", "ssh"]) == 2
    assert "gang.engine: ssh submits no job; --engine takes slurm or kubernetes" in capsys.readouterr().err

    run = load("tiny", [*chosen, f"paths.logs={tmp_path / 'logs'}"])
    engine, demand = engine_of(run), Demand.of(run)
    assert engine.turn(demand) == "ssh"
    assert engine.capacity(demand, ()) == "HOSTS names fewer than 2 hosts"
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/hosts\nexec sh -c "$2"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOSTS", "a b c")
    assert engine.capacity(demand, ()) is None and engine.available(demand, ("a",)) == 2
    handle = engine.start(demand, Board(open_store(str(tmp_path / "store")), "gang", 1), 2, ("a",))
    try:
        assert handle.alive() == {0: True, 1: True}
        until = time.monotonic() + 20
        while not (tmp_path / "hosts").exists() or len((tmp_path / "hosts").read_text().split()) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
    finally:
        handle.cancel()
    assert handle.alive() == {0: False, 1: False}
    assert sorted((tmp_path / "hosts").read_text().split()) == ["b", "c"]


def test_a_reward_of_a_file_scores_answers(tmp_path, monkeypatch, capsys):
    function, trial = blocks("reward")
    (tmp_path / "short.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    reward = ["reinforce.reward=function", "reinforce.function=short.py:short"]
    assert plan.main(["tiny-rl", *reward]) == 0
    capsys.readouterr()
    done = subprocess.run(
        [sys.executable, "-c", trial],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "[0.999, -0.003]\n", done.stderr
    with pytest.raises(Fault, match="there is no long in it"):
        rewards.function("short.py:long")


def test_a_key_of_the_page_is_known_and_leaves_fingerprints(tmp_path):
    for name in ("contract", "conf", "flows", "tasks", "trainer", "tests/conf/schema"):
        ignored = shutil.ignore_patterns("__pycache__", "own")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    field, rule = blocks("key")
    put_before(tmp_path / "conf/schema/training.py", "\n\nclass Optimizer", "", field)
    put_before(tmp_path / "conf/rules/contradictions.py", "\n\ndef ", "def contradictions", rule)

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)

    schema = json.loads(python("-m", "conf.schema", "--json").stdout)
    assert schema["$defs"]["Train"]["properties"]["label_smoothing"]["default"] == 0
    known = "from conf.load import load; load('{}', ['train.label_smoothing=0.1'])"
    refused = python("-c", known.format("tiny-dpo")).stderr
    assert "train.label_smoothing: 0.1, but train.objective is dpo: 0" in refused
    checked = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conf/schema/test_identity.py", "-k", WITH_KEYS
    )
    assert checked.returncode == 0, checked.stdout


def put_before(path: Path, end: str, start: str, code: str) -> None:
    """Put code at the end of the class or function that begins with `start` and ends before `end`."""
    text = path.read_text()
    place = text.index(end, text.index(start))
    indent = " " * 4
    path.write_text(text[:place].rstrip("\n") + "\n" + textwrap.indent(code, indent) + text[place:])
