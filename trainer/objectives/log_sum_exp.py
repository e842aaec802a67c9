"""Logarithm of the softmax's sum, for logits whose vocabulary is split over tensor-parallel ranks."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum over the whole vocabulary; the last dimension of `logits` is this rank's part."""
    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits.detach().amax(-1)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    total = reduce_from_tensor_model_parallel_region((logits - largest[..., None]).exp().sum(-1))
    return largest + total.log()
