"""Megatron-core's offloaded optimizer on a host without a GPU: its "host" and its "device" are the same memory.

HybridDeviceOptimizer checks is_cuda of each weight and of its offloaded copy. While it sorts them, is_cuda is true for
every tensor except pinned copies and tensors derived from them.
"""

# pyright: reportAttributeAccessIssue=false

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode


def install() -> None:
    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def sort(self, offload_fraction: float):
        with _PretendCuda():
            return original(self, offload_fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = sort


class _PretendCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "pinned", False)
        result = func(*args, **(kwargs or {}))
        copied = args and isinstance(args[0], torch.Tensor) and isinstance(result, torch.Tensor)
        if copied and (func is torch.Tensor.pin_memory or getattr(args[0], "pinned", False)):
            result.pinned = True
        return result
