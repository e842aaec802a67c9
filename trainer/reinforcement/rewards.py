"""Rewards of answers, from the row of the prompt.

exact          1 if the answer equals the row's answer; spaces around both are ignored
number         1 if the last number of the answer is the last number of the row's answer
regex          1 if reinforce.pattern, or else the row's answer, matches somewhere in the answer
json_schema    1 if the answer is JSON that fits the schema in reinforce.pattern, or else in the row's answer
function       result of the user's function, in a guarded process (guarded/), like regex and json_schema
judge          reward from another model, at an OpenAI-compatible address (judge.py)
code           share of the row's checks (lines of Python) that pass after the answer's program, in a guarded process
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path

from conf import rewards as own
from conf.schema.run import Run
from contract.faults import Fault, named
from trainer.reinforcement.guarded import environment
from trainer.reinforcement.guarded.worker import Question, Worker
from trainer.reinforcement.judge import Judge

RULES = {"regex": own.regex, "json_schema": own.schema}
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")


def make(run: Run) -> Callable[[Sequence[Question]], list[float]]:
    """The run's reward function for many answers at once. Raises a Fault if it cannot be loaded."""
    kind = run.reinforce.reward
    if kind in ("function", "code"):
        return _worker(run).rewards
    if kind == "judge":
        return Judge(run).rewards
    if kind in RULES:
        return partial(_by_rule, run, _worker(run))
    reward = {"exact": exact, "number": number}[kind]
    return lambda questions: [reward(question) for question in questions]


def check(run: Run) -> None:
    """Raise a Fault if the reward or the environment cannot be loaded."""
    if run.reinforce.reward in ("function", "code", *RULES):
        _worker(run).close()
    else:
        make(run)
    environment.check(run)


def require_references(run: Run, references: Iterable[str], path: Path) -> None:
    """Raise a Fault if the reward cannot use a row's answer. Called before sampling."""
    reinforce = run.reinforce
    for row, reference in enumerate(references, 1):
        with named(f"{path}:{row}"):
            if reinforce.reward == "number":
                _number_of(reference)
            elif reinforce.reward in RULES and reinforce.pattern is None:
                _rule(reinforce.reward, reference)


def _worker(run: Run) -> Worker:
    reinforce = run.reinforce
    return Worker(reinforce.reward, reinforce.function, reinforce.reward_seconds, reinforce.reward_memory_gb)


def _by_rule(run: Run, worker: Worker, questions: Sequence[Question]) -> list[float]:
    """Rewards by patterns, which the worker gets as references.

    They run in a guarded process: a pattern may take years for an answer of 40 characters, and a schema may refer to
    another one on the network.
    """
    reinforce, checks = run.reinforce, list[Question]()
    for question in questions:
        rule = question.reference if reinforce.pattern is None else reinforce.pattern
        _rule(reinforce.reward, rule)
        checks.append(Question("", question.answer, rule))
    return worker.rewards(checks)


def _rule(kind: str, text: str) -> None:
    with named("reinforce.pattern"):
        RULES[kind](text)


def exact(question: Question) -> float:
    return float(question.answer.strip() == question.reference.strip())


def number(question: Question) -> float:
    return float(last_number(question.answer) == _number_of(question.reference))


def _number_of(reference: str) -> Decimal:
    value = last_number(reference)
    if value is None:
        raise Fault(f"reinforce.reward: number, but a row's answer has no number: {reference[:60]!r}")
    return value


def last_number(text: str) -> Decimal | None:
    """The last number in a text; 1,234.50 is 1234.5."""
    numbers = [match for match in NUMBER.findall(text) if any(character.isdigit() for character in match)]
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def require_finite(rewards: Sequence[float], questions: Sequence[Question]) -> None:
    for reward, question in zip(rewards, questions, strict=True):
        if not math.isfinite(reward):
            raise Fault(f"reinforce.reward: {reward} for the answer {question.answer[:60]!r}; a number is needed")
