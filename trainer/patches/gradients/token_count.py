"""Patch for the division of gradients by a step's tokens: it is made together with their clipping.

Megatron-core multiplies every gradient by one over the tokens, by torch's kernel for a number that lies on the GPU,
which reads one value at a time: 2.3 of 346 ms of a step of GPT2-large on an H200. Transformer Engine's clip then
multiplies every gradient once more, whether it is clipped or not. Here the factor waits for the clip, and both are one
multiplication; the norm is that of the divided gradients. Numbers differ by one rounding of fp32. It is for optimizers
that clip: what nobody clips would not be divided. Can go when megatron-core hands the factor to the clip itself.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/finalize_model_grads.py
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import torch

from conf.schema.run import Run
from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}

_waiting: torch.Tensor | None = None  # what gradients are still to be multiplied by


def helps(run: Run) -> bool:
    """Whether every gradient of the run is clipped, by core's Adam, on the GPU."""
    asked = run.optimizer
    return asked.clip_grad > 0 and asked.kind == "adamw" and not asked.offload and run.train.precision != "fp16"


def install() -> None:
    """Divide where gradients are clipped. A second call changes nothing."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import optimizer

    if hasattr(optimizer, "undivided_norm"):
        return
    optimizer.undivided_norm = optimizer.get_grad_norm_fp32
    optimizer.get_grad_norm_fp32 = _divided(optimizer.get_grad_norm_fp32)
    optimizer.clip_grad_by_total_norm_fp32 = _clip
    DistributedDataParallel.scale_gradients = _keep
    DistributedDataParallel.zero_grad_buffer = _forgetting(DistributedDataParallel.zero_grad_buffer)


def _keep(chunk: Any, factor: torch.Tensor) -> None:
    """Stand in for scale_gradients(): all chunks of a model are given the same number."""
    global _waiting
    _waiting = factor


def _forgetting(clear: Callable[..., None]) -> Callable[..., None]:
    def zero_grad_buffer(chunk: Any) -> None:
        global _waiting
        _waiting = None
        clear(chunk)

    return zero_grad_buffer


def _divided(norm: Callable[..., Any]) -> Callable[..., Any]:
    def get_grad_norm_fp32(*given: Any, **named: Any) -> Any:
        found = norm(*given, **named)
        return found if _waiting is None else found * _waiting

    return get_grad_norm_fp32


def _clip(parameters: Any, max_norm: float, total_norm: Any, use_decoupled_grad: bool = False) -> None:
    """Stand in for clip_grad_by_total_norm_fp32(): the same, and the division."""
    from megatron.core.optimizer import clip_grads

    name = "decoupled_grad" if use_decoupled_grad else "grad"
    found = [getattr(one, name).detach() for one in parameters if getattr(one, name, None) is not None]
    if not found:
        return
    factor = torch.as_tensor(max_norm / (total_norm + 1.0e-6), dtype=torch.float32, device=found[0].device)
    factor = factor.clamp(max=1.0).reshape(1)
    factor = factor if _waiting is None else (factor * _waiting).reshape(1)
    if clip_grads.multi_tensor_scale_tensor_impl is None:
        torch._foreach_mul_(found, factor[0])
        return
    overflow = torch.zeros(1, dtype=torch.int, device=found[0].device)
    scale = clip_grads.multi_tensor_scale_tensor_impl
    clip_grads.multi_tensor_applier(scale, overflow, [found, found], factor)
