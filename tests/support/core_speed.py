"""A core's speed here and now, so that bounds on time hold on a busy host as they do on an idle one."""

import time
from collections.abc import Callable

IDLE = 0.25  # seconds that the loop takes on an idle core


def slowdown() -> float:
    """Time that a loop takes now, over what it takes on an idle core; at least 1."""
    return max(1.0, seconds_of(_loop) / IDLE)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of this thread on a core, without those that it waited."""
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def _loop() -> None:
    for i in range(3_000_000):
        divmod(i, 7)
