"""Patch of megatron-core's distributed optimizer: each rank saves and loads only the states that it holds.

A checkpoint that any layout can resume stores states by parameter, and a rank holds flat ranges of parameters. For it
megatron-core gathers whole buffers on the host of every data-parallel rank, 12 bytes for each parameter: 770 GB on a
host with 8 replicas of Llama-3.1-8B. To load, each rank reads as much. Its format without a gather
(fully_sharded_model_space) describes flat ranges, which its checkpoints no longer accept. Here a range becomes blocks
of the parameter: the rest of its first row, whole rows, the beginning of its last row. The checkpoint's keys, shapes
and values stay megatron-core's, so each reads checkpoints of the other.

Remove when fully_reshardable saves without a gather; tests/trainer/patches/test_divided_states.py checks it.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/distrib_optimizer.py
"""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partialmethod
from operator import add
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.patches import versions

Ints = tuple[int, ...]
OWN = "own"  # while loading, the rank's range of a state; its blocks are views of it


def install(copy: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """Save and load the states of every rank without a gather. `copy` copies a part of a state to fp32 on the host."""
    versions.check(__name__)
    DistributedOptimizer.sharded_param_state_fully_reshardable = partialmethod(_states, copy=copy or _copy)
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = _load


def _states(
    optimizer: Any, model: dict[str, Any], is_loading: bool = False, metadata: Any = None, *, copy: Callable
) -> dict[int, Any]:
    places = {place.data: place for place in nested_values(extract_sharded_tensors_and_factories(model)[0])}
    buckets = (bucket for kinds in optimizer.gbuf_ranges for buckets in kinds.values() for bucket in buckets)
    # A precision-aware optimizer returns unpacked copies of its states; other states are loaded in place.
    is_new = is_loading and optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    states: dict[int, Any] = {}
    for parameter, ranges in (item for bucket in buckets for item in bucket["param_map"].items()):
        place, start, end = places[parameter], ranges["param"].start, ranges["param"].end
        # Data-parallel ranks, the last index, hold copies of the parameter, but not of its states.
        place = replace(place, replica_id=(*place.replica_id[:2], optimizer.distributed_optimizer_instance_id))
        values = {} if is_new else optimizer._get_main_param_and_optimizer_states(parameter)
        kept = states[len(states)] = {}
        for key in ("param", *optimizer.optimizer_state_keys):
            own = torch.empty(end - start, dtype=torch.float32) if is_new else values[key].detach().flatten()
            parts = _sharded(place, f"optimizer.state.{key}.{place.key}", own, start, _same if is_loading else copy)
            kept[key] = dict(enumerate(parts)) | ({OWN: LocalNonpersistentObject(own)} if is_loading else {})
    return states


def _load(optimizer: Any, states: dict[int, Any]) -> None:
    for parts in (parts for kept in states.values() for parts in kept.values()):
        place = parts[OWN].untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == place for part in parts.values()), "loaded elsewhere"
    own = {index: {key: parts[OWN] for key, parts in kept.items()} for index, kept in states.items()}
    optimizer.load_parameter_state_from_fs_model_space(own)  # of states in the same order


def _same(part: torch.Tensor) -> torch.Tensor:
    return part


def _copy(part: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32 on the host; the writer would copy the storage of a view."""
    return torch.empty(part.shape, dtype=torch.float32).copy_(part)


def _sharded(place: Any, key: str, own: torch.Tensor, start: int, data: Callable) -> Iterator[ShardedTensor]:
    """Yield the blocks of a parameter that cover `own`, its flat range from `start`, with the data of their views."""
    whole = torch.empty(place.data.shape, dtype=torch.float32, device="meta")
    if isinstance(place, ShardedTensorFactory):
        tensors = list(nested_values({0: place.build_fn(key, whole, place.replica_id, None)}))
    else:
        tensors = [replace(place, key=key, data=whole, dtype=whole.dtype)]
    for tensor in tensors:
        view, before = tensor.data, (1,) * tensor.prepend_axis_num
        assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata, f"{key}: not a part of the weight"
        places = blocks(tuple(view.shape), view.stride(), view.storage_offset(), start, start + len(own))
        for offsets, sizes, first in places:
            part = own.as_strided(before + sizes, before + view.stride(), own.storage_offset() + first - start)
            yield replace(
                tensor,
                data=data(part),
                local_shape=before + sizes,
                global_offset=tuple(map(add, tensor.global_offset, (0,) * len(before) + offsets)),
                axis_fragmentations=None,  # blocks differ in size
                prepend_axis_num=0,
            )


def blocks(sizes: Ints, strides: Ints, first: int, start: int, end: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield the blocks of a tensor in row-major order, whose values are at `start` to `end` in its storage.

    `first` is the place of the tensor's first value. A block has offsets, sizes and the place of its first value.
    """
    last = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    if start <= first and last <= end:
        yield (0,) * len(sizes), sizes, first
    elif start < last and first < end:
        dim = next(index for index, size in enumerate(sizes) if size > 1)
        size, stride = sizes[dim], strides[dim]
        row = last - first - (size - 1) * stride
        low = min(max(-((first - start) // stride), 0), size)  # the first whole row, and the row after the last
        high = min(max((end - first - row) // stride + 1, 0), size)
        found = [(index, 1) for index in sorted({low - 1, high}) if 0 <= index < size]
        for index, count in found + [(low, high - low)] * (low < high):
            some = (*sizes[:dim], count, *sizes[dim + 1 :])
            for offsets, shape, place in blocks(some, strides, first + index * stride, start, end):
                yield (*offsets[:dim], index + offsets[dim], *offsets[dim + 1 :]), shape, place
