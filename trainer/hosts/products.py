"""Speed of a device in a large matrix product, for comparison with the speed of a step."""

# pyright: reportArgumentType=false

import time

SIZE = {"cuda": 8192, "cpu": 512}  # rows of the square matrices that are multiplied
REPEATS = {"cuda": 20, "cpu": 4}
ATTEMPTS = 3  # the fastest counts, because disturbances can only slow it


def speed(device, dtype) -> float:
    """FLOP/s of the fastest of a few attempts."""
    import torch

    size, repeats, best = SIZE[device.type], REPEATS[device.type], float("inf")
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for attempt in range(ATTEMPTS + 1):  # the first chooses a kernel and does not count
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start) if attempt else best
    return repeats * 2 * size**3 / best
