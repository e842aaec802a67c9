"""Patch of megatron-core's token dispatchers, which keep the weights of the last tokens that they sent.

With the weights they keep the graph that made them, from the router back to the layer's input. Once it was gone
through its tensors are free, but for what a Function holds otherwise: the layer's input where it is computed again, the
gradient of that, and a packed weight of attention that was unpacked. GLM-4.7's 92 layers in 4 bits on two H200 had
131.9 GB in use between two steps, and have 110.9 without. Nothing asks for the weights once tokens are back.

Can go when core's dispatchers forget them; tests/trainer/patches/test_kept_routes.py holds it.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/token_dispatcher.py
"""

import functools
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}
DISPATCHERS = ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher")


def install() -> None:
    """Have dispatchers forget all that has a graph as soon as their tokens are back."""
    versions.check(__name__, WRITTEN_FOR)
    for name in DISPATCHERS:
        kind = getattr(token_dispatcher, name)
        if not hasattr(kind.combine_postprocess, "__wrapped__"):
            kind.combine_postprocess = _forgetting(kind.combine_postprocess)


def _forgetting(finish: Any) -> Any:
    @functools.wraps(finish)
    def finish_and_forget(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
        found = finish(dispatcher, *args, **kwargs)
        _forget(dispatcher)
        if manager := vars(dispatcher).get("_comm_manager"):
            _forget(manager)
        return found

    return finish_and_forget


def _forget(holder: Any) -> None:
    for name, value in vars(holder).items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            setattr(holder, name, None)
