"""Digests of a model's values in training's memory, by their names in a checkpoint.

Every rank sums its own pieces (Megatron's main replicas). Only numbers are sent: 16 bytes and a name per tensor. On a
GPU this takes three passes over the trained weights, and copies only a few million elements at a time.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import itertools
from collections import Counter

import torch
from megatron.bridge.training import checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.utils import unwrap_model
from torch import distributed

from trainer.weights import digests, torch_dist
from trainer.weights.atomic_folder import gather
from trainer.weights.torch_dist import NOT_WEIGHTS


def metadata() -> dict:
    """Return Megatron-Bridge's save options, in a new dictionary because megatron-core writes groups into it."""
    return {"singleton_local_shards": False}


@torch.no_grad()
def of_model(model, adapter) -> dict[str, str] | None:
    """Return digests of the adapter's tensors, or of all without an adapter; None except on rank 0. All ranks must call
    it.
    """
    state = state_of(model, adapter)
    apply_factories(state)
    pieces = [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    own = [piece for piece in pieces if is_main_replica(piece.replica_id) and not NOT_WEIGHTS.search(piece.key)]
    of_ranks = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
    distributed.gather_object(_sums(own), of_ranks)
    if of_ranks is None:
        return None
    total: Counter[str] = Counter()
    for of_rank in of_ranks:
        total.update(of_rank)
    return {name: digests.text(number) for name, number in total.items()}


def facts(context, prompts: int) -> dict:
    """Return the facts about a training's model that are written next to its checkpoint. All ranks must call it."""
    of_tensors, of_adapters = of_model(context.model, context.state.cfg.peft), alpha(context.model)
    step = context.state.train_state.step
    return {"step": step, "alpha": of_adapters, "prompts": prompts, "digests": of_tensors}


def state_of(model, adapter) -> dict:
    """Return the part of a model's state that a checkpoint keeps: the adapter's, or all without an adapter."""
    state = checkpointing._generate_model_state_dict(unwrap_model(model), {"metadata": metadata()})
    return state if adapter is None else checkpointing.apply_peft_adapter_filter_to_state_dict(state, adapter)


def alpha(model) -> float | None:
    """Return the numerator of the adapters' scale in use; on every rank."""
    modules = itertools.chain.from_iterable(chunk.modules() for chunk in unwrap_model(model))
    adapters = (getattr(module, "adapter", None) for module in modules)
    alphas = set().union(*gather({adapter.alpha for adapter in adapters if hasattr(adapter, "alpha")}))
    assert len(alphas) <= 1, f"adapters of several alphas: {alphas}"
    return next(iter(alphas), None)


def _sums(pieces: list[ShardedTensor]) -> dict[str, int]:
    names, numbers = [], []
    for piece in pieces:
        depth = torch_dist.depth(piece.key, len(piece.global_shape))
        data = piece.data.reshape((1,) * piece.prepend_axis_num + tuple(piece.data.shape))
        numbers.append(digests.sums(data, piece.global_offset, depth).flatten())
        spans = zip(piece.global_offset[:depth], data.shape[:depth], strict=True)
        indices = itertools.product(*(range(start, start + size) for start, size in spans))
        names += [torch_dist.name_of(piece.key, index) for index in indices]
    sums: Counter[str] = Counter()
    values = torch.cat(numbers).tolist() if numbers else []  # the only synchronization
    for name, value in zip(names, values, strict=True):
        sums[name] += value
    return sums
