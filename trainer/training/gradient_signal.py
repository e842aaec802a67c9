"""Measure whether the gradients of successive steps agree more than noise would. If they do not, shorten the steps.

    gradient_cosine    cosine of a step's gradient and Adam's mean of the gradients before it
    gradient_signal    sum of these cosines, divided by the root of the sum of their squares; noise has deviation 1
    step_length        share of the learning rate that the step used

If rewards carry no information, the expected gradient of each step is 0, independent of earlier steps. Cosines are then
negative as often as positive, and the signal stays within a few deviations of 0, for any size of model and batch. Adam
does not shorten steps that are only noise: they move a policy by a distance that grows with the square root of the
number of steps. The length of a step is computed from earlier steps, and never from the step's own gradient.
"""

import math
from typing import Any

import torch

DECAY = 0.95  # per step, of the sums of cosines and of their squares
ROUNDING = 1e-12  # if the mean's square is below this share of the gradient's, the mean is only rounding error
ZERO_LENGTH = 1 / 3  # share of the signal for full steps, below which the step length is 0


class GradientSignal:
    """The signal in the gradients of all steps so far."""

    def __init__(self, full: float):
        """Steps have full length if the signal is at least `full`. With 0, all steps have full length."""
        self.full = full
        self.sum = self.squares = 0.0

    @property
    def value(self) -> float:
        return self.sum / math.sqrt(self.squares) if self.squares else 0.0

    @property
    def length(self) -> float:
        """Share of the learning rate for the next step."""
        if not self.full:
            return 1.0
        lowest = ZERO_LENGTH * self.full
        return min(1.0, max(0.0, (self.value - lowest) / (self.full - lowest)))

    def shorten(self, optimizer: Any) -> None:
        """Scale the learning rate of the next step by the length. Megatron-core sets the rate again after each step."""
        length = self.length
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * length

    def add(self, cosine: float) -> None:
        self.sum = DECAY * self.sum + cosine
        self.squares = DECAY**2 * self.squares + cosine**2

    def state(self) -> dict[str, float]:
        """The sums, with which a run resumes after a crash."""
        return {"sum": self.sum, "squares": self.squares}

    def resume(self, state: dict[str, float]) -> None:
        self.sum, self.squares = state["sum"], state["squares"]


def cosine_of(sums: torch.Tensor) -> float:
    """Cosine from the summed products of all parameters; 0 without a gradient or without an earlier one."""
    product, grads, means = sums.tolist()
    return product / math.sqrt(grads * means) if means > ROUNDING * grads > 0 else 0.0


def products(grad: torch.Tensor, mean: torch.Tensor, beta: float) -> torch.Tensor:
    """Dot products of a gradient g and the mean m before it: g·m, g·g and m·m.

    `mean` is Adam's mean after the step. The mean before the step is computed from it, so no copy has to be kept.
    """
    before = (mean - (1 - beta) * grad) / beta
    return torch.stack([(grad * before).sum(), (grad * grad).sum(), (before * before).sum()]).double()


def estimates(small: float, large: float, few: float, many: float) -> tuple[float, float]:
    """Squared norm of the true gradient, and variance of one token's gradient (McCandlish et al. 2018, appendix A.1).

    `small` and `large` are the squared norms of the mean gradients of batches of `few` and `many` tokens.
    """
    return (many * large - few * small) / (many - few), (small - large) / (1 / few - 1 / many)
