"""The forward_step of each objective: Megatron-Bridge's own, with another loss.

GPTModel's loss of a token is its negative log-probability, at every layout. PreferenceStep uses it, and needs no
logits.
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

OF_TEACHER = ("teacher_values", "teacher_ids")
OF_PAIRS = ("loss_mask", "reference")  # entries of a batch that the loss of dpo reads


def step(run: Run) -> Any:
    """The forward_step for Bridge's loop."""
    if run.train.z_loss:
        return WithZLoss(run.train.z_loss)
    kind = {"dpo": PreferenceStep, "distill": DistillationStep}.get(run.train.objective)
    return kind(run) if kind else gpt_step.forward_step


class PreferenceStep:
    """The forward_step of dpo: rows are pairs of a chosen answer and the rejected one."""

    def __init__(self, run: Run):
        self.settings = Settings(run.train.dpo_beta, run.train.dpo_label_smoothing)

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        tokens = batch["loss_mask"].size(1)  # _loss() divides each of the two answers by it
        output, _ = gpt_step.forward_step(state, iter([batch | {balance.WEIGHT: tokens}]), model)
        return output, partial(self._loss, {key: batch[key] for key in OF_PAIRS})

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
        mask, reference = (batch[key].to(output.device, non_blocking=True) for key in OF_PAIRS)
        answers = answer_log_probs(-whole(output.float(), None), mask)
        chosen, rejected = answers[0::2], answers[1::2]
        result = preference(self.settings, chosen, rejected, (reference[0::2], reference[1::2]))
        # Each context-parallel rank computes the loss of whole answers, and gets the gradients of its part of them.
        counts = float(parallel_state.get_context_parallel_rank() == 0)
        # Megatron divides by tokens: as many as weigh the losses of routers.
        tokens = mask.numel() // len(chosen)
        pairs = torch.tensor(len(chosen) * counts, device=output.device)
        figures = {"lm loss": result.loss.detach()} | result.figures
        sums = {name: torch.stack([values.sum() * counts, pairs]) for name, values in figures.items()}
        return result.loss.sum() * tokens, (pairs * tokens).to(torch.int), sums


class DistillationStep:
    """The forward_step of distill: compares logits with the teacher's likeliest tokens in the batch."""

    def __init__(self, run: Run):
        self.temperature = run.train.distill_temperature

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        output, _ = gpt_step.forward_step(state, iter([batch | {"labels": None}]), model)
        return output, partial(self._loss, {key: batch[key] for key in ("loss_mask", *OF_TEACHER)})

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
        group = parallel_state.get_context_parallel_group()
        whole_rows = {key: value.to(output.device, non_blocking=True) for key, value in batch.items()}
        share = get_batch_on_this_cp_rank(whole_rows, is_hybrid_cp=False, cp_group=group)
        values, ids = (share[key] for key in OF_TEACHER)
        of_tokens = divergence(output.float() / self.temperature, values, ids.long()) * share["loss_mask"]
        tokens, kl = share["loss_mask"].sum().to(of_tokens.dtype), of_tokens.sum()
        loss = kl * self.temperature**2
        sums = {name: torch.stack([total.detach(), tokens]) for name, total in (("lm loss", loss), ("kl", kl))}
        return loss, tokens.to(torch.int), sums


class TeacherStep:
    """A forward_step that returns the likeliest tokens of each position, for whole rows."""

    def __init__(self, run: Run):
        self.k, self.temperature = run.train.teacher_top_k, run.train.distill_temperature

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        output, _ = gpt_step.forward_step(state, iter([next(iterator) | {"labels": None}]), model)
        return output, self._likeliest

    def _likeliest(self, logits: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = likeliest(logits.float() / self.temperature, self.k)
        return whole(values, None), whole(ids, None)


def scores(state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
    """A forward_step that returns the log-probability of each row's answer, in a tuple of one."""
    batch = next(iterator)
    output, _ = gpt_step.forward_step(state, iter([batch]), model)

    def of_answers(losses: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor]:
        return (answer_log_probs(-whole(losses.float(), None), batch["loss_mask"].to(losses.device)),)

    return output, of_answers
