"""Flows beside one another, and after one that was killed; toys in place of the trainer's commands."""

import time

import pytest

from tests.support.flow_world import states, wait_for
from tests.support.toy_flows import LONG, Toys


def test_two_flows_on_an_empty_store_convert_once(toys: Toys):
    both = [toys.start("one", "--until", "convert"), toys.start("two", "--until", "convert", beside="one")]
    assert [process.wait(LONG) for process in both] == [0, 0], toys.said("one") + toys.said("two")
    for stage in ("download", "prepare", "convert"):
        assert sorted(states(toys.said(name))[stage] for name in ("one", "two")) == ["Cached", "Completed"]
    assert len(toys.spans()["convert"]) == 1


@pytest.mark.slow
def test_the_other_takes_over_from_one_that_is_killed(toys: Toys):
    maker = toys.start("one", "--until", "convert", convert="slow")
    wait_for(lambda: toys.begun("convert"), LONG)
    other = toys.start("two", "--until", "convert", beside="one")
    wait_for(lambda: "which makes this artifact" in toys.said("two"), LONG)
    maker.kill()
    killed = time.monotonic()
    assert other.wait(LONG) == 0, toys.said("two")
    assert states(toys.said("two"))["convert"] == "Completed" and len(toys.spans()["convert"]) == 2
    assert time.monotonic() - killed < 60


def test_a_training_that_is_killed_goes_on_and_mlflow_has_each_step_once(toys: Toys):
    """The trainer's own way to go on is tested in tests/trainer/test_train.py."""
    from mlflow import MlflowClient

    client = MlflowClient(toys.place.mlflow)

    def trainings() -> list:
        asked = "tags.finetune.stage = 'train' and params.`optimizer.lr` = '0.004'"
        return [*client.search_runs(["1"], asked)]

    def steps() -> list[int]:
        found = [client.get_metric_history(run.info.run_id, "loss/training") for run in trainings()]
        return sorted(metric.step for history in found for metric in history)

    killed = toys.start("one", "optimizer.lr=4e-3", "--until", "train", train="half")
    wait_for(lambda: steps() == [1], LONG)
    killed.kill()
    toys.run("one", "optimizer.lr=4e-3", "--until", "train")
    assert [run.info.status for run in trainings()] == ["FINISHED"]
    assert steps() == [1, 2] and len(toys.spans()["train"]) == 2
