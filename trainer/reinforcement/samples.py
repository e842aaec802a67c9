"""Answers of one step, which is the journal's unit, and what the loss is told of each."""

from dataclasses import dataclass, field


@dataclass
class Answer:
    """One sampled answer."""

    tokens: list[int]
    log_probs: list[float | None]  # the engine's, as it sampled; None of what an environment said
    text: str  # of the last turn, where there are several
    ended: bool  # by itself, and not by the limit
    reward: float = 0.0
    routes: str | None = None  # the engine's experts for each token that it has read, where they are replayed
    version: int | None = None  # of the weights that sampled, as the engine says: the optimizer steps that they had had

    @property
    def sampled(self) -> int:
        """Tokens that the policy wrote."""
        return sum(one is not None for one in self.log_probs)


@dataclass
class Group:
    """All answers to one prompt."""

    row: int  # its place among the prompts
    prompt: list[int]
    answers: list[Answer]

    @property
    def rewards(self) -> list[float]:
        return [answer.reward for answer in self.answers]


@dataclass
class Step:
    """All that one step was trained on."""

    number: int  # from 1 on
    version: int  # of the weights that it was sampled by: the number of optimizer steps that they had had
    groups: list[Group]
    drawn: int  # prompts asked for them
    old: list[list[float]] = field(
        default_factory=list
    )  # trainer's log-probabilities, where a step has several updates

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self.groups for answer in group.answers]


@dataclass(frozen=True)
class Scored:
    """One answer behind its prompt, and what its tokens are worth."""

    prompt: list[int]
    answer: list[int]
    engine: list[float | None]  # None of tokens that the policy did not write, and is not trained on
    advantage: float
    old: list[float] | None
    reference: list[float] | None
    routes: str | None = None

    @property
    def sampled(self) -> list[bool]:
        return [one is not None for one in self.engine]
