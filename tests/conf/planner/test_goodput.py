"""conf/planner/goodput.py: what failures and saves cost."""

import pytest

from conf.load import load
from conf.planner import display, hardware, verdict
from conf.planner.goodput import goodput
from tests.support.known_models import known


def test_time_lost_to_failures_grows_with_the_gpus_and_the_steps_between_checkpoints():
    keys = ["train.steps=2000", "checkpoint.save_every=100", "checkpoint.background=false", "hardware.mtbf=1000"]
    run = load("glm47", keys)
    planned = verdict.plan(run, known("glm47"), hardware.of(run))

    def predicted(run):
        return goodput(run, planned.facts, planned.time, 2000)

    found = predicted(run)
    hours = sum(found.seconds[name] for name in ("training", "saving", "evaluating")) / 3600
    assert found.failures == pytest.approx(32 * hours / 1000)
    assert found.seconds["lost"] == pytest.approx(found.failures * (50 * planned.time.likely + run.gang.silent_after))
    assert 0 < found.effective < 1 and found.seconds["training"] == 2000 * planned.time.likely
    rare = predicted(run.changed(checkpoint={"save_every": 1000}))
    assert rare.seconds["lost"] > found.seconds["lost"] and rare.seconds["saving"] < found.seconds["saving"]
    background = predicted(run.changed(checkpoint={"background": True}))  # training waits for the last of 20
    assert background.seconds["saving"] == pytest.approx(found.seconds["saving"] / 20)
    assert predicted(run.changed(hardware={"mtbf": 1e6})).seconds["lost"] == pytest.approx(found.seconds["lost"] / 1000)
    assert any(line.startswith(f"time     {found.effective:.1%} effective of ") for line in display.lines(planned))
