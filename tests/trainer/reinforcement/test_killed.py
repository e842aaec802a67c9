"""A reinforcement learning that is killed goes on with the same answers, and with the same weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract import checkpoints
from trainer.data.tickets import tickets

STEPS, KILLED_AT = 6, 4  # checkpoints at 2, 4 and 6: step 3 is repeated, step 4 is interrupted, 5 and 6 come after
KEYS = [
    "data.seq_length=64",
    "adapter.kind=none",
    "train.global_batch=8",
    "train.micro_batch=8",
    "checkpoint.save_every=2",
    f"reinforce.steps={STEPS}",
    "reinforce.start=base",
    "reinforce.prompts=4",
    "reinforce.samples=4",
    "reinforce.max_tokens=8",
    "reinforce.lr=1e-3",
    "reinforce.reward=regex",
    "reinforce.pattern=e",  # some of what a model says that was never trained
]


@pytest.fixture
def start(work, configure, base):
    """start(name) -> a process of trainer.reinforce, and the folder that it writes."""
    base("glm4-moe")
    rows = work / "tickets"
    rows.mkdir()
    lines = [json.dumps({"input": ticket, "output": team}) + "\n" for ticket, team in tickets(64, seed=0).items()]
    (rows / "training.jsonl").write_text("".join(lines[:48]))
    (rows / "validation.jsonl").write_text("".join(lines[48:]))

    started: list[subprocess.Popen] = []

    def start(name: str) -> tuple[subprocess.Popen, Path]:
        folder = work / name
        paths = [f"paths.model={work}/glm4-moe", f"paths.base={work}/glm4-moe-base", f"paths.data={rows}"]
        paths += [f"paths.reinforced={folder}", f"paths.logs={work}/{name}-logs"]
        command = [sys.executable, "-m", "trainer.reinforce", str(work / "conf.yaml"), *paths, *KEYS]
        with (work / f"{name}.log").open("a") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        return started[-1], folder

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # three starts of vLLM, beside whatever else runs
def test_killed_within_a_step_it_goes_on_to_the_same_answers(start, work):
    whole, expected = start("whole")
    assert whole.wait(900) == 0, (work / "whole.log").read_text()[-4000:]

    first, folder = start("killed")
    journal, marks = folder / "rollouts", folder / "checkpoints"
    until(lambda: (journal / f"{KILLED_AT:06d}.json").exists(), first)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert checkpoints.complete_steps(marks) == [2]
    before = {path.name: path.read_bytes() for path in journal.glob("0*.json")}
    assert len(before) == KILLED_AT

    again, _ = start("killed")
    assert again.wait(900) == 0, (work / "killed.log").read_text()[-4000:]
    assert all((journal / name).read_bytes() == content for name, content in before.items())
    assert answers(folder) == answers(expected)
    assert norms(folder) == norms(expected)
    assert any(len(set(rewards)) > 1 for _, rewards in answers(folder))  # there was something to learn
    assert len(list((expected / "rollouts").glob("0*.json"))) == STEPS


def until(holds, process: subprocess.Popen) -> None:
    end = time.monotonic() + 600
    while not holds():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def answers(folder: Path) -> list[tuple[list, list[float]]]:
    """Tokens and rewards of every answer of each step."""
    found = []
    for path in sorted((folder / "rollouts").glob("0*.json")):
        groups = json.loads(path.read_text())["groups"]
        all_of = [answer for group in groups for answer in group["answers"]]
        found.append(([answer["tokens"] for answer in all_of], [answer["reward"] for answer in all_of]))
    return found


def norms(folder: Path) -> dict[int, float]:
    """Norm of each step's gradient, as it was last computed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["grad_norm"] for line in lines if line["kind"] == "train"}
