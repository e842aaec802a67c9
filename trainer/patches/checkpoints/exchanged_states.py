"""Patch of megatron-core's distributed optimizer, which exchanges its states for a checkpoint as whole buffers.

A checkpoint that any layout can resume stores states by parameter, and each rank gets the states of its whole buffer.
megatron-core sends a buffer in one piece: per parameter 8 bytes on the GPU, 4 more on a rank without data-parallel
peers, and 36 on the host. 8 layers of Llama-3.1-8B with all weights trained take 64 GB of an H100 in their steps and
ran out of memory in the exchange. Here buffers are sent in pieces, and the host holds the result and one state of the
rank's share.

Remove when get_parameter_state_dp_zero exchanges pieces; tests/trainer/patches/test_exchanged_states.py checks it.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/distrib_optimizer.py
"""

import functools
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.patches import versions

PIECE = 2**26  # values that a rank receives at once: 268 MB


def install() -> None:
    """Exchange the states of every rank in pieces. Other exchanges stay megatron-core's."""
    versions.check(__name__)
    whole = DistributedOptimizer.get_parameter_state_dp_zero
    if hasattr(whole, "__wrapped__"):
        return

    @functools.wraps(whole)
    def states(self, use_gloo_comm=True, empty_data=False, return_on_all_ranks=False) -> dict[Any, Any] | None:
        if use_gloo_comm or empty_data or not return_on_all_ranks:
            return whole(self, use_gloo_comm, empty_data, return_on_all_ranks)
        states_by_buffer: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(self.gbuf_ranges):
            ((dtype, buckets),) = ranges.items()
            states_by_buffer[index] = {dtype: _of_buffer(self, self.buffers[index], buckets)}
        return states_by_buffer

    DistributedOptimizer.get_parameter_state_dp_zero = states


def _of_buffer(optimizer: Any, buffer: Any, buckets: list[Any]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    count = optimizer.data_parallel_group.size()
    for key in ("param", *optimizer.optimizer_state_keys):
        states[key], start = torch.zeros(buffer.numel_unpadded, dtype=torch.float32), 0
        for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
            end = start + bucket.numel_unpadded
            own = torch.zeros(bucket.grad_data.numel() // count, dtype=torch.float32)
            for parameter, place in ranges["param_map"].items():
                state = optimizer._get_main_param_and_optimizer_states(parameter)[key]
                own[place["gbuf_local"].start : place["gbuf_local"].end].copy_(state.detach().flatten())
            exchange(own, states[key][start:end], optimizer.data_parallel_group)
            start = end
    return states | {"numel_unpadded": buffer.numel_unpadded}


def exchange(own: torch.Tensor, whole: torch.Tensor, group: Any, piece: int = PIECE) -> None:
    """Fill `whole` with the shares of all ranks, one after another; the last may end with padding."""
    count = group.size()
    for start in range(0, len(own), each := max(1, piece // count)):
        sent = own[start : start + each].cuda()
        received = [torch.empty_like(sent) for _ in range(count)]
        torch.distributed.all_gather(received, sent, group)
        for rank, share in enumerate(received):
            place = whole[rank * len(own) + start :][: len(share)]
            place.copy_(share[: len(place)])
