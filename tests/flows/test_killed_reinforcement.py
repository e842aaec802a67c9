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
START = 5  # seconds until a flow that has all before it starts the trainer
CONF = f"""
name: killed
model: {{source: "tiny://glm4-moe", compare: false}}
data: {{source: "tiny://tickets", seq_length: 64, validation: 0.04, test: 0.04}}
adapter: {{kind: none}}
train: {{steps: 1, global_batch: 16, micro_batch: 16, precision: fp32}}
optimizer: {{lr: 1e-3, warmup_steps: 0}}
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

    own = {"FINETUNE_STORE": str(tmp_path / "store"), "FINETUNE_RUNS": str(tmp_path / "runs")}

    def start(number: int):
        without_effect = f"reinforce.correction_low={0.5 + number / 1000}"  # tis has no lower bound
        arguments = (conf, "--until", "reinforce", without_effect, "reinforce.held_out=0")
        return place.fork.start("flows.finetune", *arguments, output=tmp_path / f"{number}.txt", **own)

    def ended(number: int, known: set[Path]) -> Path:
        (folder,) = {*tmp_path.glob("store/reinforce/*/files/rollouts")} - known
        assert len([*folder.glob("0*.json")]) == STEPS, (tmp_path / f"{number}.txt").read_text()
        return folder.parent

    assert start(0).wait(600) == 0, (tmp_path / "0.txt").read_text()
    expected = ended(0, set())
    known = {expected / "rollouts"}
    seconds = START + time.time() - (expected / "rollouts" / "of.json").stat().st_mtime
    draw, killed, number = Random("flow"), 0, 0
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
    print(f"flow: killed {killed} times in {number} learnings of {seconds:.0f} s")
    wait_for(lambda: not left(tmp_path), 60)


def left(folder: Path) -> list[str]:
    """Trainers of these flows that still run."""
    said = [" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
    return [one for one in said if "trainer.reinforce" in one and str(folder) in one]
