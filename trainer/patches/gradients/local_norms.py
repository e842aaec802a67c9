"""Patch for the look at each rank's own gradients: it has the GPU wait for the host, and the host for the GPU.

Megatron-core asks of each bucket of gradients, before ranks add theirs up, whether its norm is a number, and waits for
the answer twice. Nothing can be started ahead, neither the sum over ranks nor the optimizer's many small kernels, and
buckets that are summed up while others are computed are not. Here norms are kept, and looked at once, when the step is
over: nothing of it has been saved, and the rank and the words are the same. Can go when megatron-core asks as late.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/param_and_grad_buffer.py
"""

import math

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core.distributed import param_and_grad_buffer

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}


class LocalGradients(Callback):
    """Callback that keeps the norms of this rank's gradients, and ends the training at one that is no number."""

    def __init__(self):
        self.norms: list[torch.Tensor] = []

    def keep(self, group, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """Stand in for check_grads() of a group of buckets."""
        assert not check_for_large, "nobody asks for that"
        if check_for_nan_or_inf:
            self.norms += [bucket.grad_data.norm(p=2) for bucket in group.buckets]

    def on_train_step_end(self, context) -> None:
        norms, self.norms = self.norms, []
        if norms and not bool((found := torch.stack(norms)).isfinite().all()):
            step = context.state.train_state.step + 1
            number, norm = next((n, norm) for n, norm in enumerate(found.tolist()) if not math.isfinite(norm))
            raise RuntimeError(f"step {step}: found NaN in local grad norm: that of bucket {number} is {norm}")


def install() -> LocalGradients:
    """Have gradients looked at by the callback that is returned, which comes before all others."""
    versions.check(__name__, WRITTEN_FOR)
    callback = LocalGradients()

    def check_grads(self, check_for_nan_or_inf, check_for_large):
        callback.keep(self, check_for_nan_or_inf, check_for_large)

    param_and_grad_buffer._ParamAndGradBucketGroup.check_grads = check_grads
    return callback
