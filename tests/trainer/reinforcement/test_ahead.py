"""Sampling beside training: by which weights each step is answered, and that none is older than the bound."""

import threading
from typing import Any

import pytest

from conf.schema.reinforcement import Reinforce
from contract.faults import Fault
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.samples import Answer, Group, Step
from trainer.reinforcement.steps.ahead import Ahead, lag, require_fresh
from trainer.reinforcement.steps.sampler import Sampled


def step(number: int, version: int) -> Step:
    return Step(number, version, [Group(0, [1], [Answer([2], [-0.1], "a", True, 1.0, version=version)])], 1)


def journalled(journal: Journal, number: int) -> Step:
    found = journal.read(number)
    assert found
    return found


class Quick:
    """A sampler that has answers at once, or when it is let."""

    def __init__(self, fails: int = 0):
        self.fails, self.steps, self.let = fails, list[tuple[int, int]](), threading.Event()
        self.let.set()

    def step(self, number: int, version: int) -> Sampled:
        assert self.let.wait(10)
        if number == self.fails:
            raise Fault(f"step {number} cannot be")
        self.steps.append((number, version))
        return Sampled(step(number, version), {"generate": 1.0})


def make(sampler: Any, journal: Journal, asked: Reinforce) -> Ahead:
    return Ahead(sampler, journal, asked)


def train(ahead: Ahead, asked: Reinforce, first: int, last: int) -> dict[int, int]:
    """Steps as the loop takes them. Returns the version that answered each."""
    found = {}
    for number in range(first, last + 1):
        version = (number - 1) * asked.updates
        taken = ahead.take(number)
        if ahead.needs(version):
            ahead.begin(version)
        taken = taken or ahead.take(number)
        assert taken and taken.step.number == number
        require_fresh(taken.step, asked)
        found[number] = taken.step.version
    return found


@pytest.fixture
def journal(tmp_path) -> Journal:
    found = Journal(tmp_path)
    found.begin({})
    return found


@pytest.mark.parametrize("updates", [1, 2])
def test_one_step_of_staleness_answers_each_step_by_the_weights_of_the_one_before(journal, updates):
    asked, sampler = Reinforce(steps=5, staleness=1, updates=updates, prompts=4), Quick()
    found = train(make(sampler, journal, asked), asked, 1, 5)
    assert found == {1: 0, 2: 0, 3: updates, 4: 2 * updates, 5: 3 * updates}
    assert [journalled(journal, number).version for number in found] == list(found.values())


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_no_step_is_ever_older_than_the_bound_and_each_is_sampled_once(journal, staleness):
    asked, sampler = Reinforce(steps=12, staleness=staleness), Quick()
    found = train(make(sampler, journal, asked), asked, 1, 12)
    assert max(lag(journalled(journal, number), asked) for number in found) == staleness
    assert [number for number, _ in sampler.steps] == list(range(1, 13))


def test_a_sampler_that_is_slower_than_training_is_left_alone_until_it_needs_weights(journal):
    asked, sampler = Reinforce(steps=4, staleness=2), Quick()
    ahead = make(sampler, journal, asked)
    sampler.let.clear()
    assert ahead.take(1) is None and ahead.needs(0)
    ahead.begin(0)
    assert not ahead.needs(0)  # it samples
    sampler.let.set()
    assert train(ahead, asked, 1, 4).keys() == {1, 2, 3, 4}


def test_what_the_journal_has_is_not_sampled_again(journal):
    for number, version in ((3, 1), (4, 2)):
        journal.write(step(number, version))
    asked, sampler = Reinforce(steps=6, staleness=1), Quick()
    assert train(make(sampler, journal, asked), asked, 3, 6) == {3: 1, 4: 2, 5: 3, 6: 4}
    assert [number for number, _ in sampler.steps] == [5, 6]


def test_answers_in_the_journal_that_are_too_old_are_sampled_again(journal, capfd):
    journal.write(step(4, 0))
    asked, sampler = Reinforce(steps=5, staleness=1), Quick()
    found = train(make(sampler, journal, asked), asked, 4, 5)
    assert found == {4: 3, 5: 3} and journalled(journal, 4).version == 3
    assert capfd.readouterr().out.count("are 3 steps old, but reinforce.staleness is 1: sampled again") == 1


def test_older_answers_than_the_bound_are_never_trained_on():
    asked = Reinforce(steps=9, staleness=2, updates=2)
    assert require_fresh(step(4, 2), asked) == 2
    with pytest.raises(
        Fault, match=r"^step 4: its answers are 3 steps older than the policy, but reinforce\.staleness"
    ):
        require_fresh(step(4, 0), asked)


def test_what_ends_the_sampling_ends_the_step_that_waits_for_it(journal):
    asked = Reinforce(steps=9, staleness=1)
    ahead = make(Quick(fails=3), journal, asked)
    with pytest.raises(Fault, match="step 3 cannot be"):
        train(ahead, asked, 1, 9)
