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
from megatron.core.utils import get_batch_on_this_cp_rank

from conf.schema.run import Run
from trainer.megatron.routers import balance
from trainer.megatron.whole_rows import whole
from trainer.objectives.distillation import divergence, likeliest
from trainer.objectives.preferences import Settings, answer_log_probs, preference
from trainer.objectives.softmax_sums import WithZLoss

TAUGHT = ("teacher_values", "teacher_ids")
OURS = ("loss_mask", "reference")  # what the loss reads of a batch


def step(run: Run) -> Any:
    """The forward_step that Bridge's loop is given."""
    if run.train.z_loss:
        return WithZLoss(run.train.z_loss)
    found = {"dpo": PreferenceStep, "distill": DistillationStep}.get(run.train.objective)
    return found(run) if found else gpt_step.forward_step


class PreferenceStep:
    """The forward_step of dpo: rows are pairs of a chosen answer and the rejected one."""

    def __init__(self, run: Run):
        self.settings = Settings(run.train.dpo_beta, run.train.dpo_label_smoothing)

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        tokens = batch["loss_mask"].size(1)  # what _loss() divides by for each of the two
        output, _ = gpt_step.forward_step(state, iter([batch | {balance.WEIGHT: tokens}]), model)
        return output, partial(self._loss, {key: batch[key] for key in OURS})

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
        mask, reference = (batch[key].to(output.device, non_blocking=True) for key in OURS)
        answers = answer_log_probs(-whole(output.float(), None), mask)
        chosen, rejected = answers[0::2], answers[1::2]
        found = preference(self.settings, chosen, rejected, (reference[0::2], reference[1::2]))
        # Each context-parallel rank computes the loss of whole answers, with gradients of its own part of them.
        counts = float(parallel_state.get_context_parallel_rank() == 0)
        # Megatron divides by tokens: as many as the losses of routers are weighed by.
        tokens = mask.numel() // len(chosen)
        pairs = torch.tensor(len(chosen) * counts, device=output.device)
        told = {"lm loss": found.loss.detach()} | found.figures
        sums = {name: torch.stack([values.sum() * counts, pairs]) for name, values in told.items()}
        return found.loss.sum() * tokens, (pairs * tokens).to(torch.int), sums


class DistillationStep:
    """The forward_step of distill: logits instead of losses, beside what the teacher said."""

    def __init__(self, run: Run):
        self.temperature = run.train.distill_temperature

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, _ = gpt_step.forward_step(state, iter([batch | {"labels": None}]), model)
        return output, partial(self._loss, {key: batch[key] for key in ("loss_mask", *TAUGHT)})

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
        group = parallel_state.get_context_parallel_group()
        given = {key: value.to(output.device, non_blocking=True) for key, value in batch.items()}
        mine = get_batch_on_this_cp_rank(given, is_hybrid_cp=False, cp_group=group)
        values, ids = (mine[key] for key in TAUGHT)
        found = divergence(output.float() / self.temperature, values, ids.long()) * mine["loss_mask"]
        tokens, kl = mine["loss_mask"].sum().to(found.dtype), found.sum()
        loss = kl * self.temperature**2
        sums = {name: torch.stack([one.detach(), tokens]) for name, one in (("lm loss", loss), ("kl", kl))}
        return loss, tokens.to(torch.int), sums


class Teaching:
    """A forward_step that gives the likeliest tokens of each place, whole rows of them."""

    def __init__(self, run: Run):
        self.k, self.temperature = run.train.teacher_top_k, run.train.distill_temperature

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        output, _ = gpt_step.forward_step(state, iter([next(iterator) | {"labels": None}]), model)
        return output, self._found

    def _found(self, logits: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = likeliest(logits.float() / self.temperature, self.k)
        return whole(values, None), whole(ids, None)


def scores(state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """A forward_step that gives the log-probability of each row's answer, alone in a tuple."""
    batch = next(iterator)
    output, _ = gpt_step.forward_step(state, iter([batch]), model)

    def found(losses: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor]:
        return (answer_log_probs(-whole(losses.float(), None), batch["loss_mask"].to(losses.device)),)

    return output, found
