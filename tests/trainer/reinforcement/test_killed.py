"""A reinforcement learning that is killed goes on with the same answers, and with the same weights.

KILLS=20 kills so many times at random moments, where the default is a few.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from contract import checkpoints, output_marks
from tests.support import preloaded
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


@pytest.fixture(scope="module")
def undisturbed(forked, place) -> tuple[Path, float]:
    """What is left of a learning that nobody kills, and the seconds that it takes once its rows are prepared."""
    process, folder = forked("undisturbed", KEYS)
    assert process.wait(600) == 0, (place / "undisturbed.log").read_text()
    return folder, time.time() - (folder / "rollouts" / "of.json").stat().st_mtime


@pytest.mark.slow
@pytest.mark.timeout(600 + 200 * KILLS)
@pytest.mark.parametrize("victims", ["trainer", "rollout", "both"])
def test_killed_at_random_moments_each_step_is_taken_once_and_as_it_would_have_been(
    victims, forked, place, undisturbed
):
    """A learning that gets to its end before it was killed often enough is followed by another."""
    (expected, seconds), draw, killed, number = undisturbed, Random(victims), 0, 0
    while killed < KILLS:
        number += 1
        name, code, written = f"{victims}-{number}", None, {}
        output_marks.take(place / name, output_marks.REINFORCEMENT)
        shutil.copytree(expected / "data", place / name / "data")  # what is prepared, which takes longer than a step
        while code != 0:
            process, folder = forked(name, KEYS)
            if killed < KILLS and wait(process, draw.uniform(0, seconds), victims):
                killed += kill(process.pid, victims)
            code = process.wait(600)
            output = (place / f"{name}.log").read_text()
            assert code in (-signal.SIGKILL, 2, 0), output[-4000:]
            told = [line for line in output.splitlines() if line.startswith("error: ")]
            assert [line.startswith("error: rollout: ") for line in told] == [True] * (code == 2), output[-4000:]
            steps = {path.name: path.read_bytes() for path in (folder / "rollouts").glob("0*.json")}
            assert steps.items() >= written.items()  # what is in the journal stays what it is
            written = steps
        require_same(place / name, expected)
    print(f"{victims}: killed {killed} times in {number} trainings of {seconds:.0f} s")


def wait(process: preloaded.Started, seconds: float, victims: str) -> bool:
    """Wait for a moment at which all who are to be killed are there; False where the training has ended before."""
    moment = time.monotonic() + seconds
    while time.monotonic() < moment or (victims != "trainer" and not children(process.pid)):
        if process.poll() is not None:
            return False
        time.sleep(0.05)
    return process.poll() is None


def kill(trainer: int, victims: str) -> bool:
    mine = children(trainer) if victims != "trainer" else []
    pids = [*mine, *([trainer] if victims != "rollout" else [])]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def children(pid: int) -> list[int]:
    """vLLM's process of a trainer."""
    try:
        return [one.pid for one in psutil.Process(pid).children() if "vllm_process" in " ".join(one.cmdline())]
    except psutil.NoSuchProcess:
        return []


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


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_was_lost_of_its_beginning_is_not_asked_of_trained_weights(finish, place, rows):
    data = place / "with-held-out"
    shutil.copytree(rows, data)
    shutil.copy(data / "validation.jsonl", data / "test.jsonl")
    keys = {"reinforce.steps": 4, "reinforce.held_out": 4, "paths.data": data}
    folder = finish("forgetful", keys)
    facts = json.loads((folder / "reinforced.json").read_text())
    assert {"before", "after"} <= facts.keys()
    (folder / "rollouts/before.json").unlink()
    shutil.rmtree(checkpoints.step_folder(folder / "checkpoints", 4))
    finish("forgetful", keys)
    del facts["before"]
    assert json.loads((folder / "reinforced.json").read_text()) == facts
    assert "greedy exact match unknown before" in (place / "forgetful.log").read_text()
