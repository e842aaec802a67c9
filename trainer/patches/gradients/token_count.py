"""Patch: divide gradients by a step's tokens and clip them in one multiplication.

Megatron-core multiplies every gradient by one over the tokens, with torch's kernel for a factor on the GPU, which reads
one value at a time: 2.3 of 346 ms of a step of GPT2-large on an H200. Transformer Engine's clip then multiplies every
gradient again, clipped or not. Here the factor is kept for the clip, which multiplies once; the norm is that of the
divided gradients. Results differ by one rounding in fp32. This requires an optimizer that clips, otherwise gradients
would not be divided. Remove when megatron-core passes the factor to the clip.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/finalize_model_grads.py
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any

import torch

from conf.schema.run import Run
from trainer.patches import versions

_factor: torch.Tensor | None = None  # factor for the gradients, applied by the clip


def helps(run: Run) -> bool:
    """Whether core's Adam clips every gradient of the run, on the GPU."""
    optimizer = run.optimizer
    clips = optimizer.clip_grad > 0 and optimizer.kind == "adamw" and not optimizer.offload
    return clips and run.train.precision != "fp16"


def install() -> None:
    """Divide in the clip. A second call has no effect."""
    versions.check(__name__)
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
    """Replace scale_gradients(); all chunks of a model get the same factor."""
    global _factor
    _factor = factor


def _forgetting(clear: Callable[..., None]) -> Callable[..., None]:
    def zero_grad_buffer(chunk: Any) -> None:
        global _factor
        _factor = None
        clear(chunk)

    return zero_grad_buffer


def _divided(norm: Callable[..., Any]) -> Callable[..., Any]:
    def get_grad_norm_fp32(*args: Any, **kwargs: Any) -> Any:
        undivided = norm(*args, **kwargs)
        return undivided if _factor is None else undivided * _factor

    return get_grad_norm_fp32


def _clip(parameters: Any, max_norm: float, total_norm: Any, use_decoupled_grad: bool = False) -> None:
    """Replace clip_grad_by_total_norm_fp32(): clip and divide."""
    from megatron.core.optimizer import clip_grads

    name = "decoupled_grad" if use_decoupled_grad else "grad"
    gradients = [getattr(weight, name).detach() for weight in parameters if getattr(weight, name, None) is not None]
    if not gradients:
        return
    factor = torch.as_tensor(max_norm / (total_norm + 1.0e-6), dtype=torch.float32, device=gradients[0].device)
    factor = factor.clamp(max=1.0).reshape(1)
    factor = factor if _factor is None else (factor * _factor).reshape(1)
    if clip_grads.multi_tensor_scale_tensor_impl is None:
        torch._foreach_mul_(gradients, factor[0])
        return
    overflow = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
    scale = clip_grads.multi_tensor_scale_tensor_impl
    clip_grads.multi_tensor_applier(scale, overflow, [gradients, gradients], factor)
