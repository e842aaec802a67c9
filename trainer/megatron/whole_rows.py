"""Assemble whole rows from the parts that context parallelism gives to ranks: for losses of whole sequences."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from typing import Any

import torch
from megatron.bridge.training.utils.packed_seq_utils import get_thd_cp_partition_indices
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank


def whole(values: torch.Tensor, cut: torch.Tensor | None) -> torch.Tensor:
    """Assemble rows from the parts of all context-parallel ranks. Gradients go to this rank's part."""
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    length = values.size(1) * group.size()
    mine = places(length, cut, group, values.device)
    of_each = [torch.empty_like(mine) for _ in range(group.size())]
    shares = [torch.empty_like(values) for _ in of_each]
    torch.distributed.all_gather(of_each, mine.contiguous(), group=group)
    torch.distributed.all_gather(shares, values.detach().contiguous(), group=group)
    rows = values.new_zeros(values.size(0), length, *values.shape[2:])
    for place, share in zip(of_each, shares, strict=True):
        rows[:, place] = share
    return rows.index_copy(1, mine, values)


def places(length: int, cut: torch.Tensor | None, group: Any, device: torch.device) -> torch.Tensor:
    """Return the positions of this context-parallel rank in rows of `length` tokens; `cut` is where packed sequences
    end.
    """
    if cut is None:
        numbers = {"tokens": torch.arange(length, device=device)[None]}
        return get_batch_on_this_cp_rank(numbers, is_hybrid_cp=False, cp_group=group)["tokens"][0]
    return get_thd_cp_partition_indices(cut.squeeze(0), total_tokens=length, cp_group=group, device=device)


def of_this_rank(values: torch.Tensor, cut: torch.Tensor | None, by_sequence: bool) -> torch.Tensor:
    """Select the tokens that this rank's routers read, from a micro batch's [rows, tokens, ...].

    Context parallelism takes parts of each row, and sequence parallelism splits these over tensor-parallel ranks. In
    Megatron's order, the first token of every row precedes the second token of any.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        values = values[:, places(values.size(1), cut, group, torch.device("cuda"))]
    tokens = values.transpose(0, 1)
    if by_sequence:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        tokens = tokens.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    return tokens.flatten(0, 1)
