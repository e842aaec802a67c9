"""tasks/stages/export.py: the step to export is one that the training has, or one that it will have."""

from types import SimpleNamespace

import pytest

from conf.load import load
from conf.rules import schedule
from contract.faults import Fault
from tasks.run.artifact import Artifact, Stage
from tasks.stages import export, train
from tasks.store import File


def training(*steps: int) -> Artifact:
    names = [f"checkpoints/iter_{step:07}/complete.json" for step in steps]
    return Artifact(Stage("train", 1), dict.fromkeys(names, File(1, "", "")), {}, {})


def tiny(checkpoint: object, every: int, *overrides: str):
    return load(
        "tiny", ["train.steps=50", f"checkpoint.save_every={every}", f"export.checkpoint={checkpoint}", *overrides]
    )


@pytest.mark.parametrize(
    "checkpoint, every, usable",
    [(10, 10, False), (10, 20, True), (20, 20, True), (40, 10, True), ("latest", 10, True), (50, 30, False)],
)
def test_a_training_without_the_step_is_made_again_if_it_gets_the_step_then(checkpoint, every, usable):
    assert export.is_usable(tiny(checkpoint, every), training(20, 40), schedule.resolved) == usable


@pytest.mark.parametrize("reinforces, usable", [(False, False), (True, True)])
def test_train_looks_for_the_step_unless_a_reinforced_policy_is_exported(reinforces, usable):
    asked = SimpleNamespace(
        run=tiny(10, 10), reinforces=reinforces, get_or_make=lambda make, valid: valid(training(20))
    )
    data = Artifact(Stage("prepare", 1), {}, {"sequences": {"training": 64}, "kind": "sft"}, {})
    some = training()
    assert train.train.fn(asked, some, some, data) == usable  # pyright: ignore[reportFunctionMemberAccess]


def test_a_step_that_is_never_saved_is_refused_before_training():
    export.require_step(tiny(50, 20))
    with pytest.raises(
        Fault, match=r"^export\.checkpoint: 30, but checkpoints are saved every 20 steps up to 50 \(chec"
    ):
        export.require_step(tiny(30, 20))
    with pytest.raises(
        Fault, match=r"up to 50 \(checkpoint\.save_every\), and the newest 2 stay \(checkpoint\.keep\)$"
    ):
        export.require_step(tiny(20, 20, "checkpoint.keep=2"))


@pytest.mark.parametrize("keep, kept", [(None, [20, 40, 50]), (3, [20, 40, 50]), (2, [40, 50]), (1, [50])])
def test_steps_that_are_saved_and_kept(keep, kept):
    run = tiny("latest", 20, f"checkpoint.keep={'null' if keep is None else keep}")
    assert [step for step in range(1, 61) if schedule.saves(run, step)] == kept
