"""Memory that two processes share: of a GPU by CUDA's IPC handles, or of a host by an unnamed file."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import os
from typing import Any

import torch

from trainer.startup import device

HANDLE, DEVICE = 7, 6  # indices in torch.multiprocessing's arguments for a CUDA tensor
SYNCED = 14  # index of: whether the opening process waits for an event of the sender's stream
OF_FILE = 2  # length of a handle without a GPU: a path and a size

_files: list[int] = []  # descriptors that the other process opens through /proc; they end with this process


def allocate(size: int) -> torch.Tensor:
    """Allocate bytes that another process can open.

    Expandable segments of a GPU, which trainer/startup/device.py enables, do not have such handles on every host. The
    allocator is switched to other segments for this allocation.
    """
    if not device.has_gpu():
        _files.append(os.memfd_create("rollout"))
        return _of_file(f"/proc/{os.getpid()}/fd/{_files[-1]}", size)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    finally:
        if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def shared(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The handle with which another process opens the tensor, which must live as long."""
    if not tensor.is_cuda:
        return str(tensor.untyped_storage().filename), len(tensor)
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    return arguments


def key(arguments: tuple[Any, ...]) -> Any:
    """The part of a handle that identifies the piece of shared memory."""
    return arguments if len(arguments) == OF_FILE else (arguments[HANDLE], arguments[HANDLE + 2])


def opened(arguments: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    if len(arguments) == OF_FILE:
        return _of_file(*arguments)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    parts = list(arguments)
    parts[DEVICE] = device.index or 0  # the sender may number its GPUs differently, or use another one
    parts[SYNCED] = False  # not needed: the sender's host has read the digests; and an event may be of another GPU
    return rebuild_cuda_tensor(*parts)


def collect() -> None:
    """Free memory that the other process has closed."""
    while _files:
        os.close(_files.pop())
    if device.has_gpu():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _of_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
