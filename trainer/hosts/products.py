"""Speed of a device: seconds of an operation, and FLOP/s of a large matrix product, to compare with those of a step."""

# pyright: reportArgumentType=false

import time
from collections.abc import Callable
from typing import Any

SIZE = {"cuda": 8192, "cpu": 512}  # rows of the square matrices that are multiplied
REPEATS = {"cuda": 20, "cpu": 4}
ATTEMPTS = 3  # the fastest counts, because disturbances can only slow it


def speed(device, dtype) -> float:
    """Return the FLOP/s of the fastest of a few attempts."""
    import torch

    size, repeats = SIZE[device.type], REPEATS[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    return repeats * 2 * size**3 / seconds(device, multiply)


def seconds(device, operation: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """Seconds of the fastest of a few attempts. `prepare` is called before each, and its time does not count."""
    import torch

    best = float("inf")
    for attempt in range(ATTEMPTS + 1):  # the first chooses a kernel or connects, and does not count
        prepare()
        start = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start) if attempt else best
    return best
