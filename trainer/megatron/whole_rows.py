"""Rows whole again, of which context parallelism gives each rank a part: for losses of whole sequences."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from typing import Any

import torch
from megatron.bridge.training.utils.packed_seq_utils import get_thd_cp_partition_indices
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import distributed


def whole(values: torch.Tensor, cut: torch.Tensor | None) -> torch.Tensor:
    """Rows of which each context-parallel rank has a part, whole. Gradients go to this rank's part."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    length = values.size(1) * group.size()
    mine = places(length, cut, group, values.device)
    of_each = [torch.empty_like(mine) for _ in range(group.size())]
    shares = [torch.empty_like(values) for _ in of_each]
    distributed.all_gather(of_each, mine.contiguous(), group=group)
    distributed.all_gather(shares, values.detach().contiguous(), group=group)
    found = values.new_zeros(values.size(0), length, *values.shape[2:])
    for place, share in zip(of_each, shares, strict=True):
        found[:, place] = share
    return found.index_copy(1, mine, values)


def places(length: int, cut: torch.Tensor | None, group: Any, device: torch.device) -> torch.Tensor:
    """Places in rows of so many tokens that this rank of a context-parallel group has; `cut` is where sequences end."""
    if cut is None:
        numbers = {"tokens": torch.arange(length, device=device)[None]}
        return get_batch_on_this_cp_rank(numbers, is_hybrid_cp=False, cp_group=group)["tokens"][0]
    return get_thd_cp_partition_indices(cut.squeeze(0), total_tokens=length, cp_group=group, device=device)


def of_this_rank(values: torch.Tensor, cut: torch.Tensor | None, by_sequence: bool) -> torch.Tensor:
    """Values of the tokens that this rank's routers read, of a micro batch's [rows, tokens, ...].

    Context parallelism takes pieces of each row, and sequence parallelism gives each tensor-parallel rank a part of
    these. Megatron has the first token of each row first.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        values = values[:, places(values.size(1), cut, group, torch.device("cuda"))]
    found = values.transpose(0, 1)
    if by_sequence:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        found = found.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return found.flatten(0, 1)
