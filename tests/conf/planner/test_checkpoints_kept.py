"""conf/planner/display.py: a word on checkpoints that would fill a store."""

import pytest

from conf.load import load
from conf.planner import display, hardware
from conf.planner.verdict import facts_of, plan


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "warning: checkpoint.keep is null: all 20 checkpoints are kept, 113.64 TB; "
        "checkpoint.keep=2 takes 17.05 TB"),
        (["checkpoint.keep=2"], None),
        (["checkpoint.save_every=1000"], None),
    ],
)  # fmt: skip
def test_checkpoints_of_all_weights_that_all_stay_are_worth_a_word(overrides, said):
    run = load("llama31-405b", overrides)
    planned = plan(run, facts_of(run), hardware.of(run))
    *_, last = display.stage_table(planned, planned.needs)
    assert last == said if said else last.startswith("all of them: ")
