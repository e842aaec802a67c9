"""Perplexity of tokens, from their mean loss."""

import math

MOST = 700.0  # exp of much more is beyond what a float holds


def perplexity(loss: float) -> float:
    """The number of tokens among which a model that chooses evenly would have this loss."""
    return math.exp(min(loss, MOST))
