"""Rewards: what an answer is worth, from the row that its prompt is of.

exact          1 where the answer is the row's answer, spaces around both aside
number         1 where the last number of the answer is the last number of the row's answer
regex          1 where reinforce.pattern, or else the row's answer, is found in the answer
json_schema    1 where the answer is JSON that fits the schema in reinforce.pattern, or else in the row's answer
function       what a function of one's own returns, in a guarded process (guarded/), as rules are
judge          what another model says, behind an OpenAI-compatible address (judge.py)
code           share of the row's checks, lines of Python, that hold after the answer's program, in such a process
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path

from conf import rewards as own
from conf.schema.run import Run
from contract.faults import Fault
from trainer.reinforcement.guarded import environment
from trainer.reinforcement.guarded.worker import Question, Worker
from trainer.reinforcement.judge import Judge

RULES = {"regex": own.regex, "json_schema": own.schema}
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d+)?")


def make(run: Run) -> Callable[[Sequence[Question]], list[float]]:
    """The reward of the run, for many answers at once. Raises a Fault where it cannot be."""
    asked = run.reinforce
    if asked.reward in ("function", "code"):
        return _worker(run).rewards
    if asked.reward == "judge":
        return Judge(run).rewards
    if asked.reward in RULES:
        return partial(_by_rule, run, _worker(run))
    one = {"exact": exact, "number": number}[asked.reward]
    return lambda questions: [one(question) for question in questions]


def check(run: Run) -> None:
    """Raise a Fault where reward or environment cannot be made, as of a function that cannot be loaded."""
    if run.reinforce.reward in ("function", "code", *RULES):
        _worker(run).close()
    else:
        make(run)
    environment.check(run)


def require_references(run: Run, references: Iterable[str], path: Path) -> None:
    """Raise a Fault where a row's answer is none that the reward can compare with, before anything is sampled."""
    asked = run.reinforce
    for row, reference in enumerate(references, 1):
        try:
            if asked.reward == "number":
                _number_of(reference)
            elif asked.reward in RULES and asked.pattern is None:
                _rule(asked.reward, reference)
        except Fault as fault:
            raise Fault(f"{path}:{row}: {fault}") from None


def _worker(run: Run) -> Worker:
    asked = run.reinforce
    return Worker(asked.reward, asked.function, asked.reward_seconds, asked.reward_memory_gb)


def _by_rule(run: Run, worker: Worker, questions: Sequence[Question]) -> list[float]:
    """Rewards by patterns, each in the place of a row's answer.

    A pattern may take years for an answer of 40 letters, and a schema may name another one on the network.
    """
    asked, found = run.reinforce, list[Question]()
    for question in questions:
        rule = question.reference if asked.pattern is None else asked.pattern
        _rule(asked.reward, rule)
        found.append(Question("", question.answer, rule))
    return worker.rewards(found)


def _rule(kind: str, text: str) -> None:
    try:
        RULES[kind](text)
    except Fault as fault:
        raise Fault(f"reinforce.pattern: {fault}") from None


def exact(question: Question) -> float:
    return float(question.answer.strip() == question.reference.strip())


def number(question: Question) -> float:
    return float(last_number(question.answer) == _number_of(question.reference))


def _number_of(reference: str) -> Decimal:
    found = last_number(reference)
    if found is None:
        raise Fault(f"reinforce.reward: number, but a row's answer has none: {reference[:60]!r}")
    return found


def last_number(text: str) -> Decimal | None:
    """The last number in a text; 1,234.50 is 1234.5."""
    found = [match for match in NUMBER.findall(text) if any(letter.isdigit() for letter in match)]
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def require_finite(rewards: Sequence[float], questions: Sequence[Question]) -> None:
    for reward, question in zip(rewards, questions, strict=True):
        if not math.isfinite(reward):
            raise Fault(f"reinforce.reward: {reward} for the answer {question.answer[:60]!r}; a number is wanted")
