"""Adapt gloo to calls that rely on NCCL: an all-to-all with sizes as tensors, and collectives with unequal shares.

Shares are unequal if experts are distributed over ranks with different numbers of tokens. Gloo needs equal shares:
all_gather pads them to the largest, and reduce_scatter becomes an all_reduce, of which each rank keeps its share.
"""

import functools

import torch
import torch.distributed as dist


def install() -> None:
    """Adapt torch.distributed's functions until this process ends. Call it once."""
    dist.all_to_all_single = _with_int_splits(dist.all_to_all_single)
    dist.all_gather = _with_unequal_shares(dist.all_gather)
    dist.reduce_scatter = _reduce_scatter


def _with_int_splits(all_to_all_single):
    @functools.wraps(all_to_all_single)
    def call(output, input, output_split_sizes=None, input_split_sizes=None, *args, **kwargs):
        return all_to_all_single(output, input, _ints(output_split_sizes), _ints(input_split_sizes), *args, **kwargs)

    return call


def _ints(sizes):
    return None if sizes is None else [int(size) for size in sizes]


def _with_unequal_shares(all_gather):
    @functools.wraps(all_gather)
    def call(tensor_list, tensor, group=None, async_op=False):
        rows = [len(share) if share.ndim else 1 for share in tensor_list]
        if len(set(rows)) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "unequal shares are gathered synchronously"
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        received = [torch.empty_like(padded) for _ in rows]
        all_gather(received, padded, group=group)
        for share, whole in zip(tensor_list, received, strict=True):
            share.copy_(whole[: len(share)])
        return None

    return call


def _reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
    assert not async_op, "shares are summed synchronously"
    whole = torch.cat([share.contiguous() for share in input_list])
    dist.all_reduce(whole, op=op, group=group)
    output.copy_(whole.split([len(share) for share in input_list])[dist.get_rank(group)])
