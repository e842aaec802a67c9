"""Which prompts a step asks, and that they leave room for an answer."""

from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.reinforcement.steps import sampler


@pytest.fixture(scope="module")
def run():
    return load("tiny-rl", [])


def test_prompts_that_leave_no_room_are_told_before_any_is_asked(run):
    sampler.require_fit(run, [56, 1], Path("rows"))
    with pytest.raises(Fault) as fault:
        sampler.require_fit(run, [56, 57, 80, 60], Path("rows"))
    assert str(fault.value) == (
        "rows:2: a prompt of 57 tokens, and 2 more are too long; the longest has 80; data.seq_length 64 less "
        "reinforce.max_tokens 8 leaves 56"
    )


def test_a_step_draws_the_same_rows_again_and_another_step_draws_others(run):
    first, again, next_one = (sampler.draw(run, step, 0, 8, 100) for step in (1, 1, 2))
    assert first == again != next_one
    assert len(set(first[0])) == 8


def test_more_prompts_than_rows_are_asked_more_than_once(run):
    chosen, seeds = sampler.draw(run, 1, 0, 8, 3)
    assert len(chosen) == 8 and len(set(seeds)) == 8
