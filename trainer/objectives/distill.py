"""Distillation (arXiv 1503.02531) from a teacher's likeliest tokens, by tensor-parallel logits.

    step(run)                                           the forward_step for Bridge's loop
    likeliest(logits, k) -> values, ids                 a teacher's k largest log-probabilities
    divergence(logits, values, ids) -> KL               of a student from a teacher, of each token

Each of the teacher's k likeliest tokens is a class, and all other tokens together are one more class with the remaining
probability. The divergence of the student from this distribution is never negative, and zero if both agree on these
classes. Without the class of the other tokens, the loss would make a student more confident than its teacher. A
temperature divides the logits of both, and the loss is multiplied by its square to keep the size of the gradients.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.utils import get_batch_on_this_cp_rank

from conf.schema.run import Run
from trainer.megatron.whole_rows import whole
from trainer.objectives.log_sum_exp import log_sum_exp

OF_TEACHER = ("teacher_values", "teacher_ids")  # entries of a batch
LEAST = 1e-9  # lower bound of the probability of all other tokens: its logarithm stays finite


def at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of these tokens, on every rank. Each token's logit comes from one tensor-parallel rank."""
    local_ids = ids - parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
    is_local = (local_ids >= 0) & (local_ids < logits.size(-1))
    local = logits.gather(-1, local_ids.clamp(0, logits.size(-1) - 1)) * is_local
    return reduce_from_tensor_model_parallel_region(local)


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest log-probabilities of each position, in descending order, and their tokens."""
    values, ids = (logits - log_sum_exp(logits)[..., None]).topk(min(k, logits.size(-1)), dim=-1)
    ids = ids + parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
    values, ids = (gather_from_tensor_model_parallel_region(share) for share in (values, ids))
    values, places = values.topk(k, dim=-1)
    return values, ids.gather(-1, places)


def divergence(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return KL(teacher || student) of each position, over the likeliest tokens and all other tokens as one class."""
    student = at(logits, ids) - log_sum_exp(logits)[..., None]
    teacher_rest, student_rest = (log_p.exp().sum(-1).neg().add(1).clamp(min=LEAST) for log_p in (values, student))
    of_rest = teacher_rest * (teacher_rest.log() - student_rest.log())
    return (values.exp() * (values - student)).sum(-1) + of_rest


def step(run: Run) -> Any:
    """Return the forward_step of distill: it compares logits with the teacher's likeliest tokens in the batch."""
    return partial(_forward, run.train.distill_temperature)


def _forward(temperature: float, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    batch = next(iterator)
    output, _ = gpt_step.forward_step(state, iter([batch | {"labels": None}]), model)
    return output, partial(_loss, temperature, {key: batch[key] for key in ("loss_mask", *OF_TEACHER)})


def _loss(temperature: float, batch: dict[str, torch.Tensor], output: torch.Tensor) -> Any:
    group = parallel_state.get_context_parallel_group()
    whole_rows = {key: value.to(output.device, non_blocking=True) for key, value in batch.items()}
    share = get_batch_on_this_cp_rank(whole_rows, is_hybrid_cp=False, cp_group=group)
    values, ids = (share[key] for key in OF_TEACHER)
    of_tokens = divergence(output.float() / temperature, values, ids.long()) * share["loss_mask"]
    tokens, kl = share["loss_mask"].sum().to(of_tokens.dtype), of_tokens.sum()
    loss = kl * temperature**2
    sums = {name: torch.stack([total.detach(), tokens]) for name, total in (("lm loss", loss), ("kl", kl))}
    return loss, tokens.to(torch.int), sums


def teacher_step(run: Run, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """A forward_step, after its first argument, that returns the likeliest tokens of each position, for whole rows."""
    output, _ = gpt_step.forward_step(state, iter([next(iterator) | {"labels": None}]), model)

    def of_rows(logits: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = likeliest(logits.float() / run.train.distill_temperature, run.train.teacher_top_k)
        return whole(values, None), whole(ids, None)

    return output, of_rows
