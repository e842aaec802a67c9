"""Perplexity of tokens, from their mean loss."""

import math

MOST = 700.0  # exp of larger values overflows


def perplexity(loss: float) -> float:
    """Return the number of tokens among which a uniform choice would have this loss."""
    return math.exp(min(loss, MOST))
