"""Memory of a GPU that two processes see, by CUDA's IPC handles."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import os
from typing import Any

import torch

HANDLE, DEVICE = 7, 6  # of what torch.multiprocessing takes a CUDA tensor apart into


def allocate(size: int) -> torch.Tensor:
    """Bytes of the GPU that another process can open.

    Segments that expand, which trainer/startup/device.py asks for, have no such handles everywhere: the allocator takes
    none of them while they are switched off.
    """
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    finally:
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def shared(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The handle by which another process opens it. The tensor has to live on meanwhile."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    return arguments


def key(arguments: tuple[Any, ...]) -> Any:
    """The part of a handle that tells one piece of shared memory from another."""
    return arguments[HANDLE], arguments[HANDLE + 2]


def opened(arguments: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    given = list(arguments)
    given[DEVICE] = device.index or 0  # the sender may number its GPUs otherwise
    return rebuild_cuda_tensor(*given)


def collect() -> None:
    """Free memory that the other process has closed."""
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
