"""Flows with reinforcement learning that are killed at random moments end with what one makes that nobody kills.

KILLS=20 kills so many times, where the default is a few.
"""

import os
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.flow_world import wait_for
from tests.support.reinforced import answers, norms, signals

KILLS = int(os.environ.get("KILLS", "3"))
STEPS = 6
CONF = f"""
name: killed
model: {{source: "tiny://glm4-moe", compare: false}}
data: {{source: "tiny://tickets", seq_length: 64, validation: 0.04, test: 0.04}}
adapter: {{kind: none}}
train: {{steps: 1, global_batch: 16, micro_batch: 16, precision: fp32}}
checkpoint: {{save_every: 2}}
reinforce: {{steps: {STEPS}, start: base, prompts: 4, samples: 4, max_tokens: 8, lr: 1e-3, reward: regex, pattern: e}}
"""


@pytest.fixture(scope="module")
def conf(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("conf") / "killed.yaml"
    file.write_text(CONF)
    return file


@pytest.mark.slow
@pytest.mark.timeout(900 + 240 * KILLS)
def test_flows_killed_at_random_moments_leave_a_learning_that_is_gone_on_with(place, conf, tmp_path):
    """A learning that gets to its end is followed by another, by a key that has no effect on it."""

    def start(number: int):
        without_effect = f"reinforce.correction_low={0.5 + number / 1000}"  # tis has no lower bound
        arguments = (conf, "--until", "reinforce", without_effect, "reinforce.held_out=0")
        return place.fork.start("flows.finetune", *arguments, output=tmp_path / f"{number}.txt")

    def ended(number: int, known: set[Path]) -> Path:
        (folder,) = {*place.folder.glob("runs/**/rollouts")} - known
        assert len([*folder.glob("0*.json")]) == STEPS, (tmp_path / f"{number}.txt").read_text()
        return folder.parent

    known = set[Path]()
    assert start(0).wait(600) == 0, (tmp_path / "0.txt").read_text()
    expected = ended(0, known)
    known.add(expected / "rollouts")
    began = time.monotonic()
    assert start(1).wait(600) == 0
    seconds, draw, killed, number = time.monotonic() - began, Random("flow"), 0, 1
    known.add(ended(1, known) / "rollouts")
    while killed < KILLS:
        number, code = number + 1, None
        while code != 0:
            flow = start(number)
            moment = time.monotonic() + draw.uniform(0, seconds)
            while killed < KILLS and time.monotonic() < moment and flow.poll() is None:
                time.sleep(0.05)
            if killed < KILLS and flow.poll() is None:
                flow.kill()
                killed += 1
            code = flow.wait(600)
            assert code in (-9, 0), (tmp_path / f"{number}.txt").read_text()
        found = ended(number, known)
        known.add(found / "rollouts")
        assert answers(found) == answers(expected) and norms(found) == norms(expected)
        assert signals(found) == signals(expected)
    print(f"flow: killed {killed} times in {number - 1} learnings of {seconds:.0f} s")
    wait_for(lambda: not left(place.folder), 60)


def left(folder: Path) -> list[str]:
    """Trainers of these flows that still run."""
    said = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    return [one for one in said if "trainer.reinforce" in one and str(folder) in one]
