"""A part of a matrix, with its codes and scales; and the parts of a base in a chunk of a model."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories

from trainer.megatron.packed_base.weight import Store
from trainer.weights import model_digests, torch_dist

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scales of blocks, and the matrix's factor


@dataclass(frozen=True)
class Part:
    """Rows of a parameter, and their box in a stored tensor."""

    start: int  # first row in the parameter
    name: str  # Megatron's, in the whole model
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # Index and number of stacked matrices, for example gate and up.
    matrix: tuple[int, int] = (0, 1)

    @classmethod
    def of_matrix(cls, name: str, shape: tuple[int, ...], number: int, count: int) -> "Part":
        """Return one whole matrix of those stacked in a stored tensor."""
        rows = shape[0] // count
        return cls(rows * number, name, (rows * number, 0), (rows, shape[1]), (number, count))

    def begin(self, rows: int) -> int:
        """Return the first row of the part's matrix in the stored tensor of `rows` rows."""
        number, count = self.matrix
        return rows // count * number


def cut(
    scales: torch.Tensor,
    offsets: tuple[int, int],
    sizes: tuple[int, int],
    block: tuple[int, int],
    of_scales: tuple[int, int],
) -> torch.Tensor:
    """Return the scales of a part's smaller blocks, from those of the matrix's blocks."""
    places = [
        (torch.arange(-(-count // small), device=scales.device) * small + begin) // size
        for count, small, begin, size in zip(sizes, block, offsets, of_scales, strict=True)
    ]
    return scales[places[0]][:, places[1]]


def unpacked(
    codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None, block: tuple[int, int]
) -> torch.Tensor:
    """Return the values of a part's codes, in fp32."""
    factors = None if factor is None else factor.view(1, 1)
    (numbers,) = Store(codes[None].contiguous(), scales[None], block, torch.float32, factors).unpack()
    return numbers


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
