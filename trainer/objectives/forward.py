"""Forward pass of an objective in Megatron-Bridge's loop: its own, with another loss.

GPTModel's loss of a token is its negative log-probability: it is the same at every layout, and needs no logits.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.core import parallel_state

from conf.schema.run import Run
from trainer.megatron.whole_rows import whole
from trainer.objectives.preferences import Settings, answer_log_probs, preference

OURS = ("loss_mask", "reference")  # what the loss reads of a batch


def step(run: Run) -> Any:
    """The forward_step that Bridge's loop is given."""
    return PreferenceStep(run) if run.train.objective == "dpo" else gpt_step.forward_step


class PreferenceStep:
    """The forward_step of dpo: rows are the chosen answers of some pairs, and behind them the rejected ones."""

    def __init__(self, run: Run):
        self.settings = Settings(run.train.dpo_beta, run.train.dpo_label_smoothing)

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, _ = gpt_step.forward_step(state, iter([batch]), model)
        return output, partial(self._loss, {key: batch[key] for key in OURS})

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
        mask, reference = (batch[key].to(output.device, non_blocking=True) for key in OURS)
        chosen, rejected = answer_log_probs(-whole(output.float(), None), mask).chunk(2)
        found = preference(self.settings, chosen, rejected, reference.chunk(2))
        # Each context-parallel rank computes the loss of whole answers, with gradients of its own part of them.
        counts = float(parallel_state.get_context_parallel_rank() == 0)
        # Megatron divides by tokens, and weighs what keeps experts balanced by those of all rows, padding included.
        tokens = mask.numel() // len(chosen)
        pairs = torch.tensor(len(chosen) * counts, device=output.device)
        told = {"lm loss": found.loss.detach()} | found.figures
        sums = {name: torch.stack([values.sum() * counts, pairs]) for name, values in told.items()}
        return found.loss.sum() * tokens, (pairs * tokens).to(torch.int), sums


def scores(state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """A forward_step that gives the log-probability of each row's answer."""
    batch = next(iterator)
    output, _ = gpt_step.forward_step(state, iter([batch]), model)

    def found(losses: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return answer_log_probs(-whole(losses.float(), None), batch["loss_mask"].to(losses.device))

    return output, found
