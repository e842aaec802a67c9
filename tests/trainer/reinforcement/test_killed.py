"""A reinforcement learning that is killed goes on with the same answers, and with the same weights.

KILLS=20 kills so many times at random moments, where the default is a few.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from contract import checkpoints
from tests.support.reinforced import answers, norms, signals

STEPS, KILLED_AT = 6, 4  # checkpoints at 2, 4 and 6: step 3 is repeated, step 4 is interrupted, 5 and 6 come after
KEYS = {"reinforce.steps": STEPS}
KILLS = int(os.environ.get("KILLS", "3"))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three starts of vLLM, beside whatever else runs
def test_killed_within_a_step_it_goes_on_to_the_same_answers(start, finish):
    expected = finish("whole", KEYS)
    first, folder = start("killed", KEYS)
    journal, marks = folder / "rollouts", folder / "checkpoints"
    until(lambda: (journal / f"{KILLED_AT:06d}.json").exists(), first)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert checkpoints.complete_steps(marks) == [2]
    before = {path.name: path.read_bytes() for path in journal.glob("0*.json")}
    assert len(before) == KILLED_AT

    finish("killed", KEYS)
    assert all((journal / name).read_bytes() == content for name, content in before.items())
    require_same(folder, expected)
    assert any(len(set(rewards)) > 1 for _, rewards in answers(folder))  # there was something to learn


@pytest.mark.slow
@pytest.mark.timeout(1200 * KILLS)
@pytest.mark.parametrize("victims", ["trainer", "rollout", "both"])
def test_killed_at_random_moments_each_step_is_taken_once_and_as_it_would_have_been(victims, start, finish):
    expected, draw, name = finish(f"undisturbed-{victims}", KEYS), Random(victims), f"random-{victims}"
    for _ in range(KILLS):
        process, _ = start(name, KEYS)
        moment = time.monotonic() + draw.uniform(0, 60)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is None:
            kill(process, victims)
            assert process.wait(120) in (-signal.SIGKILL, 2, 0), name
        if process.poll() == 0:
            break  # it was done before the moment came, or before the signal did
    require_same(finish(name, KEYS), expected)


def kill(trainer: subprocess.Popen, victims: str) -> None:
    mine = children(trainer.pid) if victims != "trainer" else []
    pids = [trainer.pid] if victims != "rollout" else []
    for pid in [*mine, *pids]:
        os.kill(pid, signal.SIGKILL)
    if not mine and victims == "rollout":
        os.kill(trainer.pid, signal.SIGKILL)  # it had none yet


def children(pid: int) -> list[int]:
    """vLLM's process of a trainer."""
    return [one.pid for one in psutil.Process(pid).children() if "vllm_process" in " ".join(one.cmdline())]


def require_same(folder: Path, expected: Path) -> None:
    assert len(list((folder / "rollouts").glob("0*.json"))) == STEPS
    assert answers(folder) == answers(expected)
    assert norms(folder) == norms(expected)
    assert signals(folder) == signals(expected)


def until(holds, process: subprocess.Popen) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
