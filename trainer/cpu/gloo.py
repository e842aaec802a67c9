"""Gloo where Megatron counts on NCCL: sizes of an all-to-all as Python ints, coalesced sends, gathers into one tensor."""

import functools

import torch
import torch.distributed as dist


def install() -> None:
    """Adapt torch.distributed's functions for the life of this process, once."""
    dist.all_to_all_single = _with_int_splits(dist.all_to_all_single)


def _with_int_splits(all_to_all_single):
    @functools.wraps(all_to_all_single)
    def call(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        return all_to_all_single(output, input, _ints(output_split_sizes), _ints(input_split_sizes), *args, **kwargs)

    return call


def _ints(sizes):
    if isinstance(sizes, torch.Tensor):
        return sizes.tolist()
    return None if sizes is None else [int(size) for size in sizes]
