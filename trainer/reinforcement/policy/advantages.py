"""Advantages: the reward of an answer compared with those of the other answers to the same prompt."""

from collections.abc import Sequence
from math import sqrt

from conf.schema.reinforcement import Loss

SMALL = 1e-6  # keeps the division finite


def of_group(rewards: Sequence[float], loss: Loss) -> list[float]:
    """Advantage of each answer to a prompt. dr_grpo does not divide by the deviation, which favours easy prompts."""
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    differences = [reward - mean for reward in rewards]
    if loss == "dr_grpo":
        return differences
    deviation = sqrt(sum(difference * difference for difference in differences) / (len(rewards) - 1))
    return [difference / (deviation + SMALL) for difference in differences]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of the answers differ."""
    return max(rewards) > min(rewards)


def overlong(length: int, longest: int, buffer: int) -> float:
    """Penalty for an answer near the limit of tokens (DAPO's soft one): from 0 down to -1."""
    allowed = longest - buffer
    if not buffer or length <= allowed:
        return 0.0
    return max(-1.0, (allowed - length) / buffer)
