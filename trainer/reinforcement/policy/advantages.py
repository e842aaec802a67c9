"""Advantages: what an answer is worth beside the others to the same prompt."""

from collections.abc import Sequence
from math import sqrt

from conf.schema.reinforcement import Loss

SMALL = 1e-6  # keeps the division finite


def of_group(rewards: Sequence[float], loss: Loss) -> list[float]:
    """Advantage of each answer to one prompt. dr_grpo does not divide by the deviation, which favours easy prompts."""
    mean = sum(rewards) / len(rewards)
    apart = [reward - mean for reward in rewards]
    if loss == "dr_grpo" or not has_signal(rewards):
        return apart if has_signal(rewards) else [0.0] * len(rewards)
    deviation = sqrt(sum(one * one for one in apart) / (len(rewards) - 1))
    return [one / (deviation + SMALL) for one in apart]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether one of the answers is worth more than another."""
    return max(rewards) > min(rewards)


def overlong(length: int, longest: int, buffer: int) -> float:
    """Punishment of an answer that comes near the limit (DAPO's soft one): 0 down to -1."""
    allowed = longest - buffer
    if not buffer or length <= allowed:
        return 0.0
    return max(-1.0, (allowed - length) / buffer)
