"""Sampling beside training, and by several engines: the same steps, once each, whatever is killed meanwhile."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from contract import checkpoints
from tests.support.reinforced import answers, norms

STEPS = 6
KEYS = {"hardware.gpu": "cpu", "reinforce.steps": STEPS}
AHEAD = {"reinforce.staleness": 1, "reinforce.updates": 2}


def lines(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "reinforce"]


def journal(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((folder / "rollouts").glob("0*.json"))]


def until(path: Path, process) -> None:
    end = time.monotonic() + 900
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_while_it_samples_beside_training_it_goes_on_to_the_same_answers(start, finish):
    expected = finish("beside", KEYS | AHEAD)
    assert [line["version_lag"] for line in lines(expected)] == [0, *[1] * (STEPS - 1)]
    assert [step["version"] for step in journal(expected)] == [0, 0, 2, 4, 6, 8]
    for step in journal(expected):
        found = [answer for group in step["groups"] for answer in group["answers"]]
        assert {answer["version"] for answer in found} == {step["version"]}
        assert step["old"]  # of the policy when the step's turn came
    assert all(line["corrected"] < 1 and line["engines"] == 1 for line in lines(expected))

    first, folder = start("killed-beside", KEYS | AHEAD)
    until(folder / "rollouts" / "000004.json", first)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert checkpoints.complete_steps(folder / "checkpoints") == [4]  # two steps of two updates
    before = answers(folder)
    assert len(before) >= 4
    finish("killed-beside", KEYS | AHEAD)
    assert answers(folder)[: len(before)] == before
    assert answers(folder) == answers(expected) and norms(folder) == norms(expected)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_engines_give_the_answers_of_one_also_when_one_of_them_is_killed(start, finish, place):
    keys = KEYS | {"reinforce.steps": 4}
    expected = finish("one-engine", keys)
    process, folder = start("two-engines", keys | {"reinforce.engines": 2})
    until(folder / "rollouts" / "000002.json", process)
    engines = [one for one in psutil.Process(process.pid).children() if "vllm_process" in " ".join(one.cmdline())]
    assert len(engines) == 2
    engines[1].kill()
    began = time.monotonic()
    log = place / "two-engines.log"
    while "engine 1: vLLM's process has ended with code -9" not in log.read_text():
        assert time.monotonic() - began < 15
        time.sleep(0.05)
    assert process.wait(900) == 0, log.read_text()[-3000:]
    assert "engine 1 is removed, and 1 of 2 engines continue" in log.read_text()
    assert lines(folder)[0]["engines"] == 2 and lines(folder)[-1]["engines"] == 1
    assert [tokens for tokens, _ in answers(folder)] == [tokens for tokens, _ in answers(expected)]
    assert norms(folder) == pytest.approx(norms(expected), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_with_no_engine_left_the_run_ends_with_one_line(start, place):
    process, folder = start("no-engine", KEYS | AHEAD | {"reinforce.engines": 2, "reinforce.steps": 200})
    until(folder / "rollouts" / "000002.json", process)
    for one in psutil.Process(process.pid).children():
        if "vllm_process" in " ".join(one.cmdline()):
            one.kill()
    assert process.wait(120) == 2
    told = [line for line in (place / "no-engine.log").read_text().splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "vLLM's process has ended with code -9" in told[0]


SLOW_REWARD = """
import time

def reward(prompt, answer, reference):
    time.sleep(0.1)
    return float("e" in answer)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_goes_on_while_answers_are_made_and_rewarded(finish, place):
    (place / "slow.py").write_text(SLOW_REWARD)
    own = {"reinforce.reward": "function", "reinforce.function": f"{place}/slow.py:reward", "reinforce.pattern": "null"}
    folder = finish("slow-reward", KEYS | own | {"reinforce.staleness": 1, "checkpoint.save_every": 6})
    steps = lines(folder)[1:]
    made = [line["seconds_generate"] + line["seconds_reward"] for line in steps]
    saved = sum(made) - sum(line["seconds_wait"] for line in steps)
    assert min(made) > 1.6  # sixteen answers
    assert saved > 0.5 * sum(min(one, line["seconds_train"]) for one, line in zip(made, steps, strict=True))
