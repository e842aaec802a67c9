"""Patch for the look at each rank's own gradients: it has the GPU wait for the host, and the host for the GPU.

Megatron-core asks of each bucket of gradients, before ranks add theirs up, whether its norm is a number, and waits for
the answer twice. Nothing can be started ahead, neither the sum over ranks nor the optimizer's many small kernels, and
buckets that are summed up while others are computed are not. Here norms are kept, and looked at once, when the step is
over: nothing of it has been saved, and the rank and the words are the same. A rank that is alone, and clips, has the
norm of all its gradients at hand, and they are not read once more. Can go when megatron-core asks as late.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/param_and_grad_buffer.py
"""

# pyright: reportOptionalMemberAccess=false

import math

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core.distributed import param_and_grad_buffer
from torch import distributed

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}


class LocalGradients(Callback):
    """Callback that keeps the norms of this rank's gradients, and ends the training at one that is no number."""

    def __init__(self):
        self.norms: list[torch.Tensor] = []
        self.alone = self.asked = False

    def on_train_start(self, context) -> None:
        self.alone = distributed.get_world_size() == 1 and context.state.cfg.optimizer.clip_grad > 0

    def keep(self, group, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """Stand in for check_grads() of a group of buckets."""
        assert not check_for_large, "nobody asks for that"
        self.asked = check_for_nan_or_inf
        if self.asked and not self.alone:
            self.norms += [bucket.grad_data.norm(p=2) for bucket in group.buckets]

    def on_train_step_end(self, context) -> None:
        norms, self.norms = self.norms, []
        if self.alone and self.asked and context.grad_norm is not None:
            norms = [torch.as_tensor(context.grad_norm)]
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
