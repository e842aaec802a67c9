"""Parts of a base's tensors in a chunk of a model, according to megatron-core."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

from trainer.weights import model_digests, torch_dist
from trainer.weights.packed_base.part import Part


def of_chunk(chunk: Any) -> dict[int, list[Part]]:
    """Return the parts of the base in each tensor of the chunk, by the tensor's storage."""
    result: dict[int, list[Part]] = {}
    for value in nested_values(chunk.sharded_state_dict(metadata=model_digests.metadata())):
        if not isinstance(value, ShardedTensor | ShardedTensorFactory) or torch_dist.NOT_WEIGHTS.search(value.key):
            continue
        state = {"tensor": value}
        apply_factories(state)
        tensors = [tensor for tensor in nested_values(state) if isinstance(tensor, ShardedTensor)]
        numbers = ((i, len(tensors)) for i in range(len(tensors)))
        result[storage(value.data)] = [
            _part(tensor, value.data, number) for tensor, number in zip(tensors, numbers, strict=True)
        ]
    return result


def storage(tensor: Any) -> int:
    """Return the identity of a tensor's storage, allocated or not."""
    return tensor.untyped_storage()._cdata


def _part(tensor: ShardedTensor, whole: torch.Tensor, matrix: tuple[int, int]) -> Part:
    depth = torch_dist.depth(tensor.key)
    assert tensor.prepend_axis_num == depth, f"{tensor.key} is not stacked like in a base"
    stride = whole.stride(0) if whole.ndim else 1
    start = int(tensor.data.storage_offset() - whole.storage_offset()) // max(1, stride)
    assert tensor.data.shape[1:] == whole.shape[1:], f"{tensor.key} is not cut by rows"
    name = torch_dist.name_of(tensor.key, tensor.global_offset[:depth])
    return Part(start, name, tuple(tensor.global_offset[depth:]), tuple(tensor.data.shape), matrix)
