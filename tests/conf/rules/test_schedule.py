"""conf/rules/schedule.py: steps from epochs, and shares of them, as they are written."""

import pytest

from conf.load import dump, load
from conf.rules import schedule
from contract.faults import ConfigError, Fault


def counted(sequences: int, *overrides: str) -> tuple[int | None, int, object, object]:
    given = any(override.startswith("optimizer.warmup") for override in overrides)
    shared = ["train.micro_batch=1", *([] if given else ["optimizer.warmup=0"])]
    run = schedule.resolved(load("tiny", [*shared, *overrides]), sequences)
    assert run.train.epochs is None and run.optimizer.warmup is None
    return run.train.steps, run.optimizer.warmup_steps, run.train.validate_every, run.checkpoint.save_every


@pytest.mark.parametrize(
    "epochs, batch, sequences, steps",
    [(1, 16, 1600, 100), (3, 16, 100, 19), (0.5, 16, 1600, 50), (0.07, 1, 100, 7), (1e-3, 16, 20, 1), (2, 16, 16, 2)],
)
def test_steps_are_whole_batches_of_the_sequences(epochs, batch, sequences, steps):
    assert counted(sequences, f"train.epochs={epochs}", f"train.global_batch={batch}")[0] == steps


def test_shares_and_epochs_become_steps():
    every = ("train.validate_every=epoch", "checkpoint.save_every=epoch")
    assert counted(1600, "train.epochs=3", "optimizer.warmup=0.03", *every) == (300, 9, 100, 100)
    assert counted(100, "train.epochs=3", *every)[2:] == (7, 7)
    shares = ("train.validate_every=0.1", "checkpoint.save_every=0.5")
    assert counted(0, "train.steps=99", "optimizer.warmup=0.1", *shares) == (99, 10, 10, 50)
    assert counted(16, "train.epochs=1", "optimizer.warmup=0.9")[:2] == (1, 0)  # a step is left for the decay


def test_what_counts_steps_already_stays_as_it_is():
    run = load("tiny")
    assert not schedule.needs_data(run) and schedule.resolved(run) == run


def test_a_resolved_run_is_a_legal_file(tmp_path):
    run = load("tiny", ["train.epochs=2", "optimizer.warmup=0.1", "checkpoint.save_every=epoch"])
    assert schedule.needs_data(run)
    dump(run, tmp_path / "asked.yaml")
    assert load(tmp_path / "asked.yaml") == run
    made = schedule.resolved(run, 160)
    dump(made, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == made and made.train.steps == 20


def test_what_does_not_go_with_the_steps_of_the_data_is_a_line():
    run = load("tiny", ["train.epochs=1", "optimizer.warmup_steps=500"])
    with pytest.raises(Fault) as fault:
        schedule.resolved(run, 1600)
    assert str(fault.value) == (
        "optimizer.warmup_steps: 500 leaves none of the 100 steps for the decay (train.epochs: 1 of 1600 sequences)"
    )
    with pytest.raises(Fault, match="more than 2147483647"):
        schedule.resolved(load("tiny", ["train.epochs=9999", "train.global_batch=16"]), 2**28)


def test_a_rehearsal_may_be_longer_than_the_run():
    run = schedule.resolved(load("tiny", ["train.epochs=1", "train.stop_after=500"]), 160)
    assert run.train.stop_after == schedule.last_step(run) == 10


def test_an_override_takes_the_place_of_the_other_key():
    run = load("tiny", ["train.epochs=2", "optimizer.warmup=0.05"])
    assert (run.train.steps, run.train.epochs) == (None, 2)
    assert (run.optimizer.warmup_steps, run.optimizer.warmup) == (0, 0.05)


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["train.steps=null"], "train.steps: required, and missing; or train.epochs, such as train.epochs: 1"),
        (
            ["train.steps=4", "train.epochs=3", "optimizer.warmup=0"],
            "train.epochs: 3, but train.steps is 4: set only one of them",
        ),
        (
            ["optimizer.warmup=0.1", "optimizer.warmup_steps=3"],
            "optimizer.warmup: 0.1, but optimizer.warmup_steps is 3: set only one of them",
        ),
        (["checkpoint.save_every=1.0"], "1.0: must be a number of steps, epoch, or a share of all steps, "),
        (["train.validate_every=epochs"], '"epochs": must be a number of steps, epoch, or a share'),
        (["train.epochs=0"], "train.epochs: 0 is too small: it must be at least 1e-06"),
    ],
)
def test_a_wrong_length_is_a_line(overrides, line):
    with pytest.raises(ConfigError) as error:
        load("tiny", overrides)
    (found,) = str(error.value).splitlines()
    assert line in found


def test_a_training_is_over_at_its_last_step_or_once_validations_got_worse_too_often():
    run = load("tiny", ["train.steps=20", "train.stop_after=12", "train.stop_after_worse=2"])
    assert schedule.last_step(run) == 12
    assert [schedule.is_over(run, step, {}) for step in (11, 12)] == [False, True]
    assert [schedule.is_over(run, 3, {"validations": {"worse": worse}}) for worse in (1, 2)] == [False, True]


def test_a_plan_counts_what_it_can():
    run = load("tiny", ["train.epochs=2", "checkpoint.save_every=epoch"])
    assert schedule.last_step(schedule.assumed(run, None)) is None and schedule.saved(run) == 2
    assert schedule.last_step(schedule.assumed(run, 1600)) == 200
    assert schedule.saved(load("tiny", ["checkpoint.save_every=0.3"])) == 4


@pytest.mark.parametrize("share", ["0.001", "1e-6"])
def test_a_share_below_a_step_is_a_step(share):
    every = f"checkpoint.save_every={share}"
    assert schedule.saved(load("tiny", [every, "train.steps=100"])) == 100
    unknown = schedule.saved(load("tiny", [every, "train.epochs=1"]))
    assert unknown == round(1 / float(share))
