"""Answers of one step, the unit of the journal, and the inputs of the loss for each."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, NonNegativeInt

Tokens = list[NonNegativeInt]


@dataclass
class Answer:
    """One sampled answer."""

    tokens: Tokens
    log_probs: list[float | None]  # of the engine at sampling; None for an environment's tokens
    text: str  # of the last turn, if there are several
    ended: bool  # with an end token or text; False if the limit cut it
    reward: float = 0.0
    routes: str | None = None  # the engine's experts for each token that it has read, if they are replayed
    version: int | None = None  # of the weights that sampled, reported by the engine: number of optimizer steps

    @property
    def sampled(self) -> int:
        """Tokens that the policy wrote."""
        return sum(value is not None for value in self.log_probs)


@dataclass
class Group:
    """All answers to one prompt."""

    row: int  # its place among the prompts
    prompt: Annotated[Tokens, Field(min_length=1)]
    answers: Annotated[list[Answer], Field(min_length=1)]

    @property
    def rewards(self) -> list[float]:
        return [answer.reward for answer in self.answers]


@dataclass
class Step:
    """All training data of one step."""

    number: int  # from 1 on
    version: int  # of the weights that sampled it: number of optimizer steps
    groups: Annotated[list[Group], Field(min_length=1)]
    drawn: int  # prompts that were answered to get the groups
    # The trainer's log-probabilities, if a step has several updates.
    old: list[list[float]] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self.groups for answer in group.answers]


@dataclass(frozen=True)
class Scored:
    """One answer with its prompt, its advantage, and the log-probabilities that the loss needs."""

    prompt: list[int]
    answer: list[int]
    engine: list[float | None]  # None for tokens that the policy did not write and is not trained on
    advantage: float
    old: list[float] | None
    reference: list[float] | None
    routes: str | None = None

    @property
    def sampled(self) -> list[bool]:
        return [value is not None for value in self.engine]
