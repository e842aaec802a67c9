"""Policy losses as defined in their papers: pure functions of log-probabilities and advantages.

    objective(settings, batch) -> loss, figures     a micro batch's part of the sum of losses, and sums for the metrics

All tensors are [answers, tokens]; mask is 1 for sampled tokens. `new` has the gradient. `old` is from the policy before
the batch's updates. `engine` is from vLLM with the weights that sampled: the same weights, or older ones if vLLM
samples during training. Megatron divides the sum of all micro batches' losses by the number of all their answers, or
of all their tokens (by_answer()): the result does not depend on how answers are grouped into micro batches.

    grpo      mean over answers of the mean over tokens (DeepSeekMath, arXiv 2402.03300)
    dr_grpo   sum over tokens divided by the longest answer allowed, mean over answers (arXiv 2503.20783)
    dapo      mean over all tokens of the batch; a separate upper clipping bound (arXiv 2503.14476)
    gspo      ratios of whole answers, by the mean of their tokens (arXiv 2507.18071)
    cispo     weights are clipped, and every token keeps its gradient (arXiv 2506.13585)

If trainer and engine give a token different probabilities, because of rounding or older weights, samples are
off-policy. tis weighs each token by the ratio of both, with an upper bound (arXiv 2508 "Your efficient RL framework
secretly brings you off-policy training"). icepop drops tokens with a ratio outside two bounds (Ring-1T). sequence_mask
drops whole answers with a geometric mean outside them (seq-mask-tis of NeMo-RL and OpenRLHF). The remaining tokens are
weighed by the ratio, and divisors do not change.
"""

from dataclasses import dataclass

import torch

from conf.schema.reinforcement import Loss, Reinforce


@dataclass(frozen=True)
class Batch:
    """Answers of one micro batch."""

    new: torch.Tensor
    old: torch.Tensor
    engine: torch.Tensor
    advantages: torch.Tensor  # the answer's, at each of its tokens
    mask: torch.Tensor
    reference: torch.Tensor | None = None  # of the initial policy, if kl is weighed


def objective(settings: Reinforce, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro batch's part of the loss, and figures for the metrics, as sums over tokens."""
    mask = batch.mask
    clipped, surrogate = policy(settings, batch)
    weight = correction(settings, batch)
    losses = weight * surrogate
    if settings.kl:
        assert batch.reference is not None
        losses = losses + settings.kl * k3((batch.new - batch.reference) * mask)
    figures = _figures(batch, clipped)
    figures["corrected"] = (_is_corrected(settings, batch, weight) * mask).sum()
    return total(settings, losses * mask, mask), figures


def policy(settings: Reinforce, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token whether the ratio of new to old was clipped, and its loss."""
    difference, advantages = (batch.new - batch.old) * batch.mask, batch.advantages
    if settings.loss == "gspo":
        mean = mean_of_answers(difference, batch.mask)[:, None]
        difference = batch.new - batch.new.detach() + mean.detach()  # the answer's ratio, each token's gradient
    ratio = torch.exp(difference)
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.loss == "cispo":
        surrogate = -bounded.detach() * advantages * batch.new
        return bounded != ratio, surrogate
    surrogate = torch.max(-ratio * advantages, -bounded * advantages)
    return -bounded * advantages > -ratio * advantages, surrogate


def correction(settings: Reinforce, batch: Batch) -> torch.Tensor:
    """Weight of each token that corrects the difference between trainer and engine. It has no gradient."""
    difference = (batch.old - batch.engine) * batch.mask
    low, high = settings.correction_low, settings.correction_high
    if settings.correction == "tis":
        return torch.exp(difference).clamp(max=high).detach()
    if settings.correction == "icepop":
        ratio = torch.exp(difference)
        return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio)).detach()
    if settings.correction == "sequence_mask":
        mean = torch.exp(mean_of_answers(difference, batch.mask))[:, None]
        return (torch.exp(difference) * ((mean >= low) & (mean <= high))).detach()
    return torch.ones_like(difference)


def _is_corrected(settings: Reinforce, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
    """Whether a token's weight was reduced to the bound, or is 0."""
    if settings.correction == "tis":
        return torch.exp((batch.old - batch.engine) * batch.mask) > weight
    return weight == 0


def total(settings: Reinforce, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of the losses of tokens or answers, which are then divided by their number."""
    if not by_answer(settings.loss):
        return losses.sum()
    if settings.loss == "dr_grpo":
        return losses.sum() / settings.max_tokens
    return mean_of_answers(losses, mask).sum()


def by_answer(loss: Loss) -> bool:
    """Whether the loss is a mean over answers, not over tokens."""
    return loss not in ("dapo", "cispo")


def mean_of_answers(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def k3(difference: torch.Tensor) -> torch.Tensor:
    """Schulman's estimate of KL(new || other) at tokens that new has sampled; difference = new - other.

    expm1 keeps precision if both nearly agree.
    """
    return torch.expm1(-difference) + difference


def _figures(batch: Batch, clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = batch.mask
    difference = ((batch.old - batch.engine) * mask).detach()
    figures = {
        "tokens": mask.sum(),
        "mismatch": difference.abs().sum(),
        # KL(engine || trainer), because the engine has sampled
        "mismatch_k3": (k3(-difference.double()) * mask).sum(),
        "mismatch_max": difference.abs().max(),
        "clipped": (clipped * mask).sum(),
        "log_prob": (batch.new.detach() * mask).sum(),
    }
    if batch.reference is not None:
        figures["kl"] = k3(((batch.new - batch.reference) * mask).detach()).sum()
    return figures
