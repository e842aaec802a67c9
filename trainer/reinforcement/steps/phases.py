"""Seconds of each phase of a step."""

import contextlib
import time
from collections.abc import Iterator


class Phases:
    """Seconds by name, since the last reset()."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def reset(self) -> None:
        self.seconds = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase, unless the block raises."""
        start = time.monotonic()
        yield
        self.add(name, time.monotonic() - start)
