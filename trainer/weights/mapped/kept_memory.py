"""Memory that a thread keeps for what it does with one tensor after another.

To give memory back and ask for it again takes longer than to merge a tensor: the kernel clears it page by page.
"""

import threading

import torch

LARGEST = 2**26  # bytes that are kept for the next tensor
_kept = threading.local()


def take(use: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of so many numbers, of any value. What this thread has taken for the same use before is gone."""
    size = count * dtype.itemsize
    memory = getattr(_kept, use, None)
    if memory is None or len(memory) < size:
        memory = torch.empty(size, dtype=torch.uint8)
        if size <= LARGEST:
            setattr(_kept, use, memory)
    return memory[:size].view(dtype)
