"""Rewards that are rules, and what an answer is worth beside others."""

import math
import socket
from pathlib import Path

import pytest

from conf.load import load
from contract.faults import Fault
from trainer.reinforcement import rewards
from trainer.reinforcement.guarded.worker import Question, Worker
from trainer.reinforcement.policy import advantages

SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """Workers end with a test, not with this process alone."""
    made: list[Worker] = []

    def make(*given):
        made.append(Worker(*given))
        return made[-1]

    monkeypatch.setattr(rewards, "Worker", make)
    yield
    for worker in made:
        worker.close()


def worth(kind: str, answer: str, reference: str, pattern: str | None = None) -> float:
    said = [f"reinforce.pattern='{pattern}'"] if pattern else []
    run = load("tiny-rl", [f"reinforce.reward={kind}", *said])
    return rewards.make(run)([Question("prompt", answer, reference)])[0]


@pytest.mark.parametrize(
    ("kind", "answer", "reference", "pattern", "expected"),
    [
        ("exact", " sales\n", "sales", None, 1.0),
        ("exact", "sale", "sales", None, 0.0),
        ("number", "so it is 1,234.50.", "#### 1234.5", None, 1.0),
        ("number", "3, or 4", "3", None, 0.0),
        ("number", "none", "3", None, 0.0),
        ("number", "-2e3", "-2000", None, 1.0),
        ("regex", "the answer: 42", "ignored", r"answer:\s*\d+", 1.0),
        ("regex", "no", "^yes$", None, 0.0),
        ("json_schema", '{"age": 3}', SCHEMA, None, 1.0),
        ("json_schema", '{"age": "3"}', SCHEMA, None, 0.0),
        ("json_schema", "not JSON", SCHEMA, None, 0.0),
        ("json_schema", "[" * 100_000, SCHEMA, None, 0.0),
    ],
)
def test_a_rule_says_what_an_answer_is_worth(kind, answer, reference, pattern, expected):
    assert worth(kind, answer, reference, pattern) == expected


@pytest.mark.parametrize(
    ("kind", "reference", "pattern", "said"),
    [
        ("regex", "(", None, r"^reinforce\.pattern: '\(' is not a regular expression"),
        ("json_schema", '{"type": 3}', None, r"^reinforce\.pattern: .* is not a JSON schema"),
        ("number", "none", None, r"^reinforce\.reward: number, but a row's answer has no number: 'none'$"),
    ],
)
def test_a_rule_that_is_none_is_told_in_one_line(kind, reference, pattern, said):
    with pytest.raises(Fault, match=said) as fault:
        worth(kind, "1", reference, pattern)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("kind", "answer", "rule"),
    [("regex", "a" * 60 + "b", "^(a+)+$"), ("json_schema", f'"{"a" * 60}b"', '{"pattern": "^(a+)+$"}')],
)
def test_a_rule_that_never_ends_is_one_line(kind, answer, rule):
    run = load("tiny-rl", [f"reinforce.reward={kind}", f"reinforce.pattern='{rule}'", "reinforce.reward_seconds=0.5"])
    reward = rewards.make(run)
    with pytest.raises(
        Fault, match=rf"^reinforce\.reward: {kind}: for the answer .*: no end within 0\.5 s \(reinforce\."
    ):
        reward([Question("prompt", answer, "")])
    assert reward([Question("prompt", '"a"', "")]) == [1.0 if kind == "json_schema" else 0.0]


def test_a_schema_that_names_another_one_reaches_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        named = f'{{"$ref": "http://127.0.0.1:{server.getsockname()[1]}/schema.json"}}'
        with pytest.raises(Fault, match=r"^reinforce\.reward: json_schema: for the answer '1': .*schema.json") as fault:
            worth("json_schema", "1", named)
        assert "\n" not in str(fault.value)
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "said"),
    [
        ("number", "#### 3", "three", r"reinforce\.reward: number, but a row's answer has no number: 'three'$"),
        ("regex", "^3$", "(3", r"reinforce\.pattern: '\(3' is not a regular expression"),
        ("json_schema", SCHEMA, "3", r"reinforce\.pattern: '3' is not a JSON schema"),
    ],
)
def test_a_row_without_an_answer_to_compare_with_is_named_before_anything_is_sampled(kind, right, wrong, said):
    run, path = load("tiny-rl", [f"reinforce.reward={kind}"]), Path("training.jsonl")
    rewards.require_references(run, [right, right], path)
    with pytest.raises(Fault, match=rf"^training\.jsonl:2: {said}"):
        rewards.require_references(run, [right, wrong, right], path)
    for other in ("exact", "code"):
        rewards.require_references(load("tiny-rl", [f"reinforce.reward={other}"]), [wrong], path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_is_a_number(value):
    with pytest.raises(Fault, match=r"for the answer 'a'; a number is needed$"):
        rewards.require_finite([value], [Question("p", "a", "")])


def test_advantages_are_those_of_the_papers():
    """DeepSeekMath, and TRL's std with Bessel's correction; Dr.GRPO without the deviation."""
    found = advantages.of_group([1.0, 0.0, 0.0, 0.0], "grpo")
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)
    assert advantages.of_group([1.0, 0.0, 0.0, 0.0], "dr_grpo") == [0.75, -0.25, -0.25, -0.25]
    assert advantages.of_group([0.3, 0.3, 0.3], "grpo") == [0.0, 0.0, 0.0]  # not the rounding of a mean


def test_an_answer_near_the_limit_is_worth_less():
    """DAPO, equation 13."""
    assert [advantages.overlong(length, 20, 4) for length in (10, 16, 18, 20, 21)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert advantages.overlong(20, 20, 0) == 0.0
