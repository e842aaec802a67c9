"""Seconds of each phase of a step."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class Phases:
    """Seconds by the name of the phase."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase, unless the block raises."""
        start = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - start
