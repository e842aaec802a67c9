"""Parts of a base's tensors that a chunk of a model holds, as megatron-core says it."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

from trainer.weights import model_digests, torch_dist
from trainer.weights.packed_base.part import Part


def of_chunk(chunk: Any) -> dict[int, list[Part]]:
    """Parts of the base that each tensor of the chunk is made of, by the tensor's storage."""
    found: dict[int, list[Part]] = {}
    for value in nested_values(chunk.sharded_state_dict(metadata=model_digests.metadata())):
        if not isinstance(value, ShardedTensor | ShardedTensorFactory) or torch_dist.NOT_WEIGHTS.search(value.key):
            continue
        state = {"tensor": value}
        apply_factories(state)
        made = [one for one in nested_values(state) if isinstance(one, ShardedTensor)]
        numbers = ((i, len(made)) for i in range(len(made)))
        found[storage(value.data)] = [_part(one, value.data, number) for one, number in zip(made, numbers, strict=True)]
    return found


def storage(tensor: Any) -> int:
    """Identity of a tensor's memory, also where it has none."""
    return tensor.untyped_storage()._cdata


def _part(one: ShardedTensor, whole: torch.Tensor, matrix: tuple[int, int]) -> Part:
    depth = torch_dist.depth(one.key)
    assert one.prepend_axis_num == depth, f"{one.key} is stacked in another way than a base is"
    stride = whole.stride(0) if whole.ndim else 1
    start = int(one.data.storage_offset() - whole.storage_offset()) // max(1, stride)
    assert one.data.shape[1:] == whole.shape[1:], f"{one.key} is cut into other parts than rows"
    name = torch_dist.name_of(one.key, one.global_offset[:depth])
    return Part(start, name, tuple(one.global_offset[depth:]), tuple(one.data.shape), matrix)
