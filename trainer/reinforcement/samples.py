"""Answers of one step, and what Megatron's loop is fed from them.

Step(...)                       all answers to all prompts of a step; the journal's unit
micro_batches(...)              padded batches of a rank's share, as its loop takes them
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Answer:
    """One sampled answer."""

    tokens: list[int]
    log_probs: list[float]  # the engine's, as it sampled
    text: str
    ended: bool  # by itself, and not by the limit
    reward: float = 0.0


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
    version: int  # of the weights that sampled: the number of optimizer steps that they had had
    groups: list[Group]
    drawn: int  # prompts asked for them
    old: list[list[float]] = field(
        default_factory=list
    )  # trainer's log-probabilities, where a step has several updates


@dataclass(frozen=True)
class Scored:
    """One answer behind its prompt, and what its tokens are worth."""

    prompt: list[int]
    answer: list[int]
    engine: list[float]
    advantage: float
    old: list[float] | None
    reference: list[float] | None


def micro_batches(sequences: Sequence[Scored], size: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Padded batches of so many sequences. Padding stands behind, and changes nothing in front of it."""
    return [_batch(sequences[start : start + size], length) for start in range(0, len(sequences), size)]


def _batch(sequences: Sequence[Scored], length: int) -> dict[str, torch.Tensor]:
    shape = (len(sequences), length)
    tokens, labels = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    names = ("loss_mask", "engine", "advantages", "old", "reference")
    found = {name: torch.zeros(shape) for name in names}
    for number, one in enumerate(sequences):
        row = torch.tensor(one.prompt + one.answer)
        learned = slice(len(one.prompt) - 1, len(row) - 1)
        tokens[number, : len(row) - 1], labels[number, : len(row) - 1] = row[:-1], row[1:]
        found["loss_mask"][number, learned] = 1
        found["advantages"][number, learned] = one.advantage
        for name, values in (("engine", one.engine), ("old", one.old), ("reference", one.reference)):
            if values is not None:
                found[name][number, learned] = torch.tensor(values)
    positions = torch.arange(length).repeat(len(sequences), 1)
    return {"tokens": tokens, "labels": labels, "position_ids": positions} | found
