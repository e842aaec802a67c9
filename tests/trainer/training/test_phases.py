"""The journal of a training that was killed accounts for all of its time."""

import time

import pytest

from tasks.gang.history import spent
from tasks.gang.history.timeline import DONE, Attempt, Host


def test_time_of_a_killed_training_is_accounted_for(configure, base, ranks, tmp_path):
    base("llama")
    paths = [f"paths.{name}={tmp_path}/{name}" for name in ("output", "logs", "parity")]
    settings = ["train.steps=8", "checkpoint.save_every=3", "train.validate_every=4", "train.validate_batches=1"]
    run, host, attempts = configure("llama", *paths, *settings), (Host("", "", 0, 0, 1),), []
    for number, (kill_at, code) in enumerate([(5, -9), (None, 0)], 1):
        began = time.time()
        assert ranks("train", run, kill_at=kill_at).code == code
        how = "killed" if code else DONE
        attempts.append(Attempt(number, began, host, 0, kill_at or 8, ended=time.time(), how=how, joined=began))
    starts = spent.read(tmp_path / "output")
    assert [lines[0]["start"] for lines in starts] == [0, 3]
    assert [line["step"] for line in starts[1] if line.get("saved")] == [6, 8]
    seconds = spent.of(attempts, starts, 1).seconds
    assert sum(seconds.values()) == pytest.approx(attempts[-1].ended - attempts[0].began, rel=0.01)
    measured = sum(value for lines in starts for line in lines for value in line["seconds"].values())
    assert measured < sum(seconds.values())
    assert all(seconds[name] > 0 for name in ("lost", "repeated", "training", "saving", "evaluating", "loading"))
    assert seconds["waiting"] == 0 and seconds["idle"] < 0.5 * sum(seconds.values())
