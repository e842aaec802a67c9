"""flows/run_command.py: what a dry run says that stages will take."""

from pathlib import Path

import pytest

from conf.load import load
from flows.run_command import forecast
from tasks.run import artifact
from tasks.run.artifact import Stage, Work
from tasks.run.steps import Request
from tasks.stages import plan
from tasks.store import open_store

MODEL, OTHER = Stage("download", 1, {"source": "a"}), Stage("download", 1, {"source": "b"})


def stages(model: Stage, steps: int) -> dict[str, Stage]:
    data = Stage("prepare", 1, {}, {"model": model.fingerprint})
    base = Stage("convert", 1, {}, {"model": model.fingerprint})
    inputs = {"base": base.fingerprint, "data": data.fingerprint}
    return {one.name: one for one in (model, data, base, Stage("train", 1, {"train": {"steps": steps}}, inputs))}


@pytest.fixture
def said(tmp_path):
    """said(steps, *overrides) -> the dry run's line of each stage, where MODEL was trained for 100 steps."""
    store = open_store(str(tmp_path / "store"))

    def fill(work: Work) -> dict:
        (work.folder / "files").mkdir(exist_ok=True)
        (Path(work.folder) / "files/x").write_text("x")
        return {"steps": 100, "median_step_seconds": 0.5} if work.folder.name.startswith("train") else {}

    for stage in stages(MODEL, 100).values():
        artifact.get_or_make(stage, store, fill, tmp_path / "work", lambda _: None, {"flow": "toy"})

    def said(model: Stage, steps: int, *overrides: str) -> dict[str, str]:
        planned = plan.settle(load("tiny", [f"train.steps={steps}", *overrides]))
        lines = forecast(Request(stages(model, steps), {}), store, planned)
        return {line.split()[0]: line for line in lines}

    return said


def test_a_training_of_more_steps_takes_longer_than_the_last_one(said):
    found = said(MODEL, 1100)
    assert (
        "train.steps: 100 -> 1100; about 0:08:20, at 0.5 s per step, by a similar artifact of the same model"
        in found["train"]
    )
    assert " hit " in found["convert"] and found["known"].startswith("known cost: 0:08:20 in sequence")


def test_what_another_model_took_says_nothing(said):
    found = said(OTHER, 100)
    assert all("; no similar artifact of this model exists yet" in found[name] for name in ("convert", "train"))
    assert found["known"].endswith(", without download, prepare, convert, train")


def test_on_gpus_the_plan_says_it(said):
    found = said(OTHER, 100, "hardware.gpu=h100")
    assert "; 20 s and 5.2 MB by the plan" in found["convert"] and " by the plan" in found["train"]
