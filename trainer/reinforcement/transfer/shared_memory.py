"""Memory that two processes see: of a GPU, by CUDA's IPC handles, or of a host, by a file that has no name."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import os
from typing import Any

import torch

from trainer.startup import device

HANDLE, DEVICE = 7, 6  # of what torch.multiprocessing takes a CUDA tensor apart into
SYNCED = 14  # whether who opens it waits for an event of the sender's stream
OF_FILE = 2  # parts of a handle without a GPU: a path, and a size

_files: list[int] = []  # descriptors that the other process opens by this one's /proc: gone with this process


def allocate(size: int) -> torch.Tensor:
    """Bytes that another process can open.

    Segments of a GPU that expand, which trainer/startup/device.py asks for, have no such handles everywhere: the
    allocator takes none of them while they are switched off.
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
    """The handle by which another process opens it. The tensor has to live on meanwhile."""
    if not tensor.is_cuda:
        return str(tensor.untyped_storage().filename), len(tensor)
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor)
    return arguments


def key(arguments: tuple[Any, ...]) -> Any:
    """The part of a handle that tells one piece of shared memory from another."""
    return arguments if len(arguments) == OF_FILE else (arguments[HANDLE], arguments[HANDLE + 2])


def opened(arguments: tuple[Any, ...], where: torch.device) -> torch.Tensor:
    if len(arguments) == OF_FILE:
        return _of_file(*arguments)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    given = list(arguments)
    given[DEVICE] = where.index or 0  # the sender may number its GPUs otherwise, or have another one
    given[SYNCED] = False  # the sender's host has read digests of all that is there; an event may be of another GPU
    return rebuild_cuda_tensor(*given)


def collect() -> None:
    """Free memory that the other process has closed."""
    while _files:
        os.close(_files.pop())
    if device.has_gpu():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _of_file(path: str, size: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
