"""Memory that a thread reuses for one tensor after another.

Freeing and allocating memory takes longer than merging a tensor: the kernel clears it page by page.
"""

import threading

import torch

LARGEST = 2**26  # bytes kept for the next tensor
_kept = threading.local()


def take(use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialized memory of `count` values. It invalidates this thread's previous memory of the same use."""
    size = count * dtype.itemsize
    memory = getattr(_kept, use, None)
    if memory is None or len(memory) < size:
        memory = torch.empty(size, dtype=torch.uint8)
        if size <= LARGEST:
            setattr(_kept, use, memory)
    return memory[:size].view(dtype)
