"""Offloaded optimizer of core where there is no GPU to be relieved: its "host" and its "device" are both this memory.

HybridDeviceOptimizer asks each weight whether it lies on a GPU, and each copy of one whether it no longer does. While
it sorts them, every tensor answers yes, except for pinned copies and tensors made of them.
"""

# pyright: reportAttributeAccessIssue=false

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode


def install() -> None:
    original = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def sort(self, offload_fraction: float):
        with _Pretence():
            return original(self, offload_fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = sort


class _Pretence(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "pinned", False)
        found = func(*args, **(kwargs or {}))
        copied = args and isinstance(args[0], torch.Tensor) and isinstance(found, torch.Tensor)
        if copied and (func is torch.Tensor.pin_memory or getattr(args[0], "pinned", False)):
            found.pinned = True
        return found
