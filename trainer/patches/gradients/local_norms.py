"""Patch for the check of each rank's gradients, which makes host and GPU wait for each other.

For each bucket of gradients, before their sum over ranks, megatron-core checks whether the norm is finite, and waits
for the result twice. Nothing can be queued meanwhile, neither the sum over ranks nor the optimizer's many small
kernels, and the sum does not overlap with computation. Here norms are kept and checked once, at the end of the step,
before anything of it is saved. Rank and error message are the same. A single rank that clips already has the norm of
all its gradients, so they are not read again. Remove when megatron-core checks as late.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/param_and_grad_buffer.py
"""

# pyright: reportOptionalMemberAccess=false

import math

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core.distributed import param_and_grad_buffer
from torch import distributed

from trainer.patches import versions


class LocalGradients(Callback):
    """Callback that keeps the norms of this rank's gradients, and ends training if one is not finite."""

    def __init__(self):
        self.norms: list[torch.Tensor] = []
        self.alone = self.enabled = False

    def on_train_start(self, context) -> None:
        self.alone = distributed.get_world_size() == 1 and context.state.cfg.optimizer.clip_grad > 0

    def keep(self, group, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """Replace check_grads() of a group of buckets."""
        assert not check_for_large, "not supported"
        self.enabled = check_for_nan_or_inf
        if self.enabled and not self.alone:
            self.norms += [bucket.grad_data.norm(p=2) for bucket in group.buckets]

    def on_train_step_end(self, context) -> None:
        norms, self.norms = self.norms, []
        if self.alone and self.enabled and context.grad_norm is not None:
            norms = [torch.as_tensor(context.grad_norm)]
        if norms and not bool((stacked := torch.stack(norms)).isfinite().all()):
            step = context.state.train_state.step + 1
            number, norm = next((n, norm) for n, norm in enumerate(stacked.tolist()) if not math.isfinite(norm))
            raise RuntimeError(f"step {step}: found NaN in local grad norm: that of bucket {number} is {norm}")


def install() -> LocalGradients:
    """Let the returned callback check gradients; it must precede all other callbacks."""
    versions.check(__name__)
    callback = LocalGradients()

    def check_grads(self, check_for_nan_or_inf, check_for_large):
        callback.keep(self, check_for_nan_or_inf, check_for_large)

    param_and_grad_buffer._ParamAndGradBucketGroup.check_grads = check_grads
    return callback
