"""The journal of answers: what was written is read again, and of another run it is refused."""

import json

import pytest

from conf.load import load
from conf.rules.reinforcement import contents
from contract.faults import Fault
from trainer.reinforcement.journal import Journal
from trainer.reinforcement.samples import Answer, Group, Step


@pytest.fixture
def step() -> Step:
    answers = [Answer([5, 2], [-0.1, -1e-7], "a", True, 1.0), Answer([6], [-2.5], "b", False, 0.0)]
    return Step(3, 2, [Group(7, [1, 2, 3], answers)], 1, [[-0.2, -0.3], [-2.4]])


def test_a_step_is_read_as_it_was_written(tmp_path, step):
    journal = Journal(tmp_path)
    journal.begin({"steps": 5, "lr": 1e-3})
    assert journal.read(3) is None
    journal.write(step)
    assert Journal(tmp_path).read(3) == step


def test_a_journal_of_other_keys_is_not_gone_on_with(tmp_path):
    Journal(tmp_path).begin({"steps": 5, "lr": 1e-3})
    Journal(tmp_path).begin({"steps": 5, "lr": 1e-3})
    with pytest.raises(Fault, match=r"^reinforce\.lr: 0\.002, but .*/rollouts was begun with 0\.001; set it back"):
        Journal(tmp_path).begin({"steps": 5, "lr": 2e-3})


def test_a_journal_of_another_reward_of_one_s_own_is_not_gone_on_with(tmp_path):
    file = tmp_path / "mine.py"

    def begin(source: str) -> None:
        file.write_text(source)
        run = load("tiny-rl", ["reinforce.reward=function", f"reinforce.function={file}:mine"])
        Journal(tmp_path).begin({"steps": 5} | contents(run))

    Journal(tmp_path).begin({"steps": 5})  # as it was when contents were not noted
    begin("def mine(**asked): pass")
    (tmp_path / "rollouts/of.json").unlink()
    begin("def mine(**asked): pass")
    with pytest.raises(
        Fault, match=r"^reinforce\.function: \"sha256:.*:mine\", but .*/rollouts was begun with \"sha256:"
    ):
        begin("def mine(**asked): return 1")


def test_a_step_that_is_damaged_is_named(tmp_path):
    journal = Journal(tmp_path)
    journal.begin({})
    (tmp_path / "rollouts/000001.json").write_text('{"number": 1}')
    with pytest.raises(Fault, match=r"000001\.json: not what trainer\.reinforce writes"):
        journal.read(1)


DAMAGES = {
    "another step's": lambda found: found.update(number=7),
    "no group": lambda found: found["groups"].clear(),
    "no answer": lambda found: found["groups"][0]["answers"].clear(),
    "fewer log-probabilities": lambda found: found["groups"][0]["answers"][0]["log_probs"].pop(),
    "a token that is none": lambda found: found["groups"][0]["answers"][0]["tokens"].__setitem__(0, -5),
    "tokens as text": lambda found: found["groups"][0]["answers"][1].update(tokens="a"),
    "a reward that is none": lambda found: found["groups"][0]["answers"][0].update(reward=None),
    "a prompt that is none": lambda found: found["groups"][0].update(prompt=None),
    "fewer of the trainer's": lambda found: found["old"].pop(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_step_that_would_be_trained_on_wrongly_is_refused(tmp_path, step, damage):
    journal = Journal(tmp_path)
    journal.begin({})
    journal.write(step)
    path = tmp_path / "rollouts/000003.json"
    found = json.loads(path.read_text())
    DAMAGES[damage](found)
    path.write_text(json.dumps(found))
    with pytest.raises(Fault, match=r"000003\.json: .*; if you remove it, the step is sampled again$"):
        journal.read(3)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_half_a_step_is_told_with_what_mends_it(tmp_path, step, share):
    journal = Journal(tmp_path)
    journal.begin({})
    journal.write(step)
    path = tmp_path / "rollouts/000003.json"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(
        Fault, match=r"000003\.json: not readable as JSON .*; if you remove it, the step is sampled again$"
    ):
        journal.read(3)
