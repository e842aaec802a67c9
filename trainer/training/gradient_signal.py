"""Whether the gradients of steps point the same way more than noise would, and how long steps are while they do not.

    gradient_cosine    of a step's gradient and the mean of those before it, which Adam keeps
    gradient_signal    sum of these cosines, over the root of the sum of their squares; of noise, its deviation is 1
    step_length        share of the learning rate that the step was made with

Where rewards say nothing, the expected gradient of each step is 0, whatever the steps before it were. Cosines are then
as often below 0 as above it, and the signal stays within a few deviations of 0, at any size of model and batch. Adam
makes such steps as long as any, so that noise alone moves a policy as far as the root of their number. The length of a
step follows from the steps before it: a gradient has no say in how far itself goes.
"""

import math
from typing import Any

import torch

KEPT = 0.95  # of the sums of cosines and of their squares
ROUNDED = 1e-12  # share of a gradient's square that the square of a mean of nothing comes to
NOTHING = 1 / 3  # of the signal that is asked for full steps: below it, none is made


class GradientSignal:
    """The signal in the gradients of all steps so far."""

    def __init__(self, asked: float):
        """`asked` is the signal from which on steps have full length, 0 where all have."""
        self.asked = asked
        self.sum = self.squares = 0.0

    @property
    def value(self) -> float:
        return self.sum / math.sqrt(self.squares) if self.squares else 0.0

    @property
    def length(self) -> float:
        """Share of the learning rate for the next step."""
        if not self.asked:
            return 1.0
        least = NOTHING * self.asked
        return min(1.0, max(0.0, (self.value - least) / (self.asked - least)))

    def shorten(self, optimizer: Any) -> None:
        """Have the next step be as long as the signal allows. Core sets the rate anew behind each step."""
        length = self.length
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * length

    def add(self, cosine: float) -> None:
        self.sum = KEPT * self.sum + cosine
        self.squares = KEPT**2 * self.squares + cosine**2

    def state(self) -> dict[str, float]:
        """Sums that a start after a crash goes on with."""
        return {"sum": self.sum, "squares": self.squares}

    def resume(self, state: dict[str, float]) -> None:
        self.sum, self.squares = state["sum"], state["squares"]


def cosine_of(sums: torch.Tensor) -> float:
    """Cosine by the products of all parameters together; 0 where there was no gradient, or none before it."""
    product, grads, means = sums.tolist()
    return product / math.sqrt(grads * means) if means > ROUNDED * grads > 0 else 0.0


def products(grad: torch.Tensor, mean: torch.Tensor, beta: float) -> torch.Tensor:
    """Products of a gradient and the mean before it: of both, of the gradient with itself, of the mean with itself.

    The mean before is what Adam's mean is now without the gradient's part, so that none has to be kept.
    """
    before = (mean - (1 - beta) * grad) / beta
    return torch.stack([(grad * before).sum(), (grad * grad).sum(), (before * before).sum()]).double()
