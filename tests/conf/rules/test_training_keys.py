"""Keys of a training that go with some values of others alone: each refusal is one line that names the key."""

import pytest

from conf.load import ConfigError, load
from conf.rules import schedule

ALL_WEIGHTS = ["adapter.kind=none", "optimizer.distributed=false", "optimizer.kind=muon"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["optimizer.kind=muon", "optimizer.distributed=false"], "optimizer.kind: muon trains all weights"),
        (["optimizer.kind=muon", "adapter.kind=none"], "optimizer.distributed: true, but muon needs whole matrices"),
        ([*ALL_WEIGHTS, "train.precision=fp16"], "optimizer.kind: muon does not support train.precision fp16"),
        (["export.weights=ema"], "export.weights: ema, but train.ema_decay is null: no mean is kept"),
        (["export.weights=ema", "train.ema_decay=0.9", "export.checkpoint=base"], "export.weights: ema, but export."),
        (["train.ema_decay=1.0"], "train.ema_decay: "),
        (["export.every=2", "adapter.kind=none"], "export.every: writes adapters, but adapter.kind is none"),
        (["model.adapter=folder", "adapter.kind=dora"], "model.adapter: can only be continued as LoRA, but adapter"),
        (["train.stop_after_worse=0"], "train.stop_after_worse: "),
    ],
)
def test_a_refusal_is_one_line(changes, says):
    with pytest.raises(ConfigError) as refused:
        load("tiny", changes)
    assert [line for line in str(refused.value).splitlines() if says in line] == str(refused.value).splitlines()


def test_a_training_is_over_at_its_last_step_or_behind_validations_that_got_worse():
    run, patient = load("tiny"), load("tiny", ["train.stop_after_worse=3"])
    worse = {"validations": {"loss": 2.0, "lowest": 1.0, "worse": 3}}
    assert [schedule.is_over(run, step, worse) for step in (50, 100)] == [False, True]
    assert [schedule.is_over(patient, 50, mark) for mark in (worse, {}, {"validations": {"worse": 2}})] == [
        True,
        False,
        False,
    ]
