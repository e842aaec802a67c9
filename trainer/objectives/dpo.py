"""Direct preference optimization (arXiv 2305.18290), as pure functions of log-probabilities of whole answers.

    preference(settings, chosen, rejected, of_reference) -> Preference     of one micro batch

The reward of an answer is beta times the difference of its log-probability from that of the reference. The loss of a
pair is the logistic loss of the margin between both rewards. With label smoothing, a share of the pairs counts as if
their order were wrong (conservative DPO). TRL computes the same with loss_type "sigmoid".
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from conf.rules.objectives import FIGURES


@dataclass(frozen=True)
class Settings:
    beta: float = 0.1
    label_smoothing: float = 0.0


@dataclass(frozen=True)
class Preference:
    loss: torch.Tensor  # of each pair
    figures: dict[str, torch.Tensor]  # of each pair


def preference(
    settings: Settings, chosen: torch.Tensor, rejected: torch.Tensor, reference: tuple[torch.Tensor, torch.Tensor]
) -> Preference:
    """The loss of pairs. All tensors are [pairs], sums over an answer's tokens; `reference` has both."""
    rewards = [settings.beta * (own - before) for own, before in zip((chosen, rejected), reference, strict=True)]
    margin = rewards[0] - rewards[1]
    share = settings.label_smoothing
    loss = -(1 - share) * logsigmoid(margin) - share * logsigmoid(-margin)
    figures = [*rewards, (margin > 0).to(margin.dtype), margin]
    return Preference(loss, {name: values.detach() for name, values in zip(FIGURES["dpo"], figures, strict=True)})


def answer_log_probs(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probability of each row's answer: the sum over its learned tokens. Both arguments are [rows, tokens]."""
    return (log_probs * mask).sum(-1)
