"""Direct preference optimization (arXiv 2305.18290) from log-probabilities of whole answers.

    step(run)                                                                       the forward_step for Bridge's loop
    preference(beta, smoothing, chosen, rejected, reference) -> losses, figures     of the pairs of a micro batch

The reward of an answer is beta times the difference of its log-probability from that of the reference. The loss of a
pair is the logistic loss of the margin between both rewards. With label smoothing, a share of the pairs counts as if
their order were wrong (conservative DPO). TRL computes the same with loss_type "sigmoid".
GPTModel's loss of a token is its negative log-probability at every layout, so no logits are needed.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import logsigmoid

from conf.rules.objectives.dpo import OBJECTIVE
from conf.schema.run import Run

OF_PAIRS = ("loss_mask", "reference")  # entries of a batch that the loss reads


def preference(
    beta: float, smoothing: float, chosen: torch.Tensor, rejected: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and figures of each pair. Tensors are [pairs], sums over an answer; `reference` is [2, pairs]."""
    rewards = [beta * (chosen - reference[0]), beta * (rejected - reference[1])]
    margin = rewards[0] - rewards[1]
    losses = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
    figures = [*rewards, (margin > 0).to(margin.dtype), margin]
    return losses, {name: values.detach() for name, values in zip(OBJECTIVE.figures, figures, strict=True)}


def answer_log_probs(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each row's answer, the sum over learned tokens. Arguments are [rows, tokens]."""
    return (log_probs * mask).sum(-1)


def step(run: Run) -> Any:
    """Return the forward_step of dpo: rows are pairs of a chosen answer and the rejected one."""
    return partial(_forward, run.train.dpo_beta, run.train.dpo_label_smoothing)


def _forward(beta: float, smoothing: float, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    from megatron.bridge.training import gpt_step

    from trainer.megatron.routers import balance

    batch = next(iterator)
    tokens = batch["loss_mask"].size(1)  # _loss() divides each of the two answers by it
    output, _ = gpt_step.forward_step(state, iter([batch | {balance.WEIGHT: tokens}]), model)
    return output, partial(_loss, beta, smoothing, {key: batch[key] for key in OF_PAIRS})


def _loss(beta: float, smoothing: float, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
    from megatron.core import parallel_state

    from trainer.megatron.whole_rows import whole

    mask, reference = (batch[key].to(output.device, non_blocking=True) for key in OF_PAIRS)
    answers = answer_log_probs(-whole(output.float(), None), mask)
    chosen, rejected = answers[0::2], answers[1::2]
    losses, figures = preference(beta, smoothing, chosen, rejected, reference.view(-1, 2).t())
    # Each context-parallel rank computes the loss of whole answers, and gets the gradients of its part of them.
    counts = float(parallel_state.get_context_parallel_rank() == 0)
    # Megatron divides by tokens: as many as weigh the losses of routers.
    tokens = mask.numel() // len(chosen)
    pairs = torch.tensor(len(chosen) * counts, device=output.device)
    figures = {"lm loss": losses.detach()} | figures
    sums = {name: torch.stack([values.sum() * counts, pairs]) for name, values in figures.items()}
    return losses.sum() * tokens, (pairs * tokens).to(torch.int), sums


def scores(state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """A forward_step that returns the log-probability of each row's answer, in a tuple of one."""
    from megatron.bridge.training import gpt_step

    from trainer.megatron.whole_rows import whole

    batch = next(iterator)
    output, _ = gpt_step.forward_step(state, iter([batch]), model)

    def of_answers(losses: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor]:
        return (answer_log_probs(-whole(losses.float(), None), batch["loss_mask"].to(losses.device)),)

    return output, of_answers
