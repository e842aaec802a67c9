"""Distillation (arXiv 1503.02531) from a teacher's likeliest tokens, as pure functions of logits cut over tp.

    likeliest(logits, k) -> values, ids                 a teacher's k largest log-probabilities
    divergence(logits, values, ids) -> KL               of a student from a teacher, of each token

The teacher's k likeliest tokens are classes of their own, and all others are one class more, whose probability is what
is left. The divergence of the student from that is never negative, and zero where both agree on these classes; without
the class of the others a student would be driven to be surer than its teacher. At a temperature both have their logits
divided by it, and the loss counts times its square, so that gradients keep their size.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import distributed

from trainer.objectives.log_sum_exp import log_sum_exp

LEAST = 1e-9  # of the probability of all other tokens: its logarithm stays a number


def at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits of these tokens, each of which one rank has."""
    own = ids - parallel_state.get_tensor_model_parallel_rank() * logits.size(-1)
    mine = (own >= 0) & (own < logits.size(-1))
    found = logits.gather(-1, own.clamp(0, logits.size(-1) - 1)) * mine
    return reduce_from_tensor_model_parallel_region(found)


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest log-probabilities of each place, in falling order, and their tokens."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    values, ids = (logits - log_sum_exp(logits)[..., None]).topk(min(k, logits.size(-1)), dim=-1)
    ids = ids + rank * logits.size(-1)
    if size > 1:
        group = parallel_state.get_tensor_model_parallel_group()
        every = [[torch.empty_like(one) for _ in range(size)] for one in (values, ids)]
        for shares, one in zip(every, (values, ids), strict=True):
            distributed.all_gather(shares, one.contiguous(), group=group)
        values, ids = (torch.cat(shares, -1) for shares in every)
    values, places = values.topk(k, dim=-1)
    return values, ids.gather(-1, places)


def divergence(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) over the teacher's likeliest tokens and all others as one, of each place."""
    found = at(logits, ids) - log_sum_exp(logits)[..., None]
    rest, left = (one.exp().sum(-1).neg().add(1).clamp(min=LEAST) for one in (values, found))
    return (values.exp() * (values - found)).sum(-1) + rest * (rest.log() - left.log())
