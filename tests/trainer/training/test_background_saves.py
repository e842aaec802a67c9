"""Checkpoints are written while training continues, are the same, and a crash leaves the last complete one."""

import json
import random
from pathlib import Path

import pytest

from contract import checkpoints

TWO = ["layout.gpus_per_node=2", "checkpoint.background=true"]
FOUR = ["layout.gpus_per_node=4", "layout.pp=2"]
SLOW = 1.0  # seconds


@pytest.fixture
def train(configure, base, ranks, tmp_path):
    """train(wish, *keys) -> result of a training with this wish (tests/support/ranks/train_with_slow_saves.py)."""
    base("llama")

    def train(wish: dict, *keys: str, name: str = "run"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "wish.json").write_text(json.dumps(wish))
        full = ["adapter.kind=none", "optimizer.lr=1e-3", "optimizer.warmup_steps=0", "train.validate_every=0"]
        return ranks("train_with_slow_saves", configure("llama", *full, f"paths.output={folder}", *keys))

    return train


def of_kind(result, kind: str) -> dict[int, dict]:
    return {line["step"]: line for line in result.metrics if line["kind"] == kind}


def losses(result) -> dict[int, float]:
    return {step: line["lm_loss"] for step, line in of_kind(result, "train").items()}


def test_a_checkpoint_has_the_weights_of_its_step_bit_by_bit(train, tmp_path):
    keys = [*FOUR, "train.steps=5", "checkpoint.save_every=2"]
    found, files = {}, {}
    for name, wish in (("waits", {}), ("continues", {"slow": SLOW})):
        found[name] = train(wish, *keys, f"checkpoint.background={str(name == 'continues').lower()}", name=name)
        assert found[name].code == 0, found[name].output
        folder = tmp_path / name / "checkpoints"
        assert checkpoints.complete_steps(folder) == [2, 4, 5]
        paths = [path for path in folder.rglob("*") if path.suffix == ".distcp" or path.name == "tensors.json"]
        files[name] = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    assert losses(found["waits"]) == losses(found["continues"])
    assert files["waits"] == files["continues"] and len(files["waits"]) > 3
    lines = of_kind(found["continues"], "checkpoint")
    assert lines[2]["writing_seconds"] > SLOW
    assert lines[5]["stalled_seconds"] > SLOW / 2  # it waited for the save before
    waits = of_kind(found["waits"], "checkpoint").values()
    assert all(line["stalled_seconds"] > line["writing_seconds"] for line in waits)


# While the third save begins, the second is written and the first is complete.
KILLS = [{"kill": 1, "save": 3, "seconds": SLOW / 4}, {"kill": 0}]
draw = random.Random(45)
MANY = [{"kill": draw.randrange(2), "save": 3, "seconds": draw.uniform(0, SLOW)} for _ in range(20)]


@pytest.mark.parametrize("kills, steps", [(KILLS, 8), pytest.param(MANY, 160, marks=pytest.mark.slow)])
def test_killed_while_it_saves_it_repeats_the_lost_steps_to_the_last_bit(train, tmp_path, kills, steps):
    keys = [*TWO, f"train.steps={steps}", "checkpoint.save_every=2", "checkpoint.keep=1"]
    whole = train({}, *keys, name="whole")
    assert checkpoints.complete_steps(tmp_path / "whole/checkpoints") == [steps]
    folder, before = tmp_path / "run/checkpoints", 0
    for wish in kills:
        result = train({"slow": SLOW / 2} | wish, *keys)
        assert result.code == -9, result.output
        complete = checkpoints.complete_steps(folder)
        assert len(complete) in (1, 2) and complete[-1] >= before  # two: killed before the older one was removed
        before = complete[-1]
    result = train({}, *keys)
    assert result.code == 0, result.output
    assert losses(result) == losses(whole)
    assert checkpoints.complete_steps(folder) == [steps]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_ends_the_training_with_a_line(train, tmp_path, rank):
    result = train({"full": rank, "slow": 0.2}, *TWO, "train.steps=40", "checkpoint.save_every=2")
    assert result.code == 2, result.output
    lines = {line for line in result.output.splitlines() if line.startswith("error: ")}
    folder = tmp_path / "run/checkpoints"
    assert len(lines) == 1 and f"{folder}: a checkpoint could not be written" in lines.pop()
    assert max(losses(result)) < 40 and not [*Path(folder).glob("iter_*")]
