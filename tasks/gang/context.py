"""Context of a gang: everything that stays the same over its attempts."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conf.schema.run import Run
from contract.faults import Stopped
from tasks.gang.diagnosis import next_step
from tasks.gang.engines import Demand, Engine
from tasks.gang.history.timeline import Teller
from tasks.gang.job import Job
from tasks.store import Store

TICK = 0.5


@dataclass(frozen=True)
class Gang:
    name: str
    folder: Path
    job: Job  # on the configured number of hosts; an attempt may have fewer
    store: Store
    engine: Engine
    say: Callable[[str], None]
    stop: Callable[[], bool]
    tick: Callable[[], None]
    teller: Teller
    fits: next_step.Fits  # the run on fewer hosts

    @property
    def run(self) -> Run:
        """The run on the configured number of hosts."""
        return self.job.run

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Stopped as soon as the gang is cancelled."""
        until = time.monotonic() + seconds
        while True:
            if self.stop():
                raise Stopped(f"{self.name}: stopped")
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, TICK))

    def available(self, without: tuple[str, ...]) -> int | None:
        """Number of hosts except `without`, free or not. None if gang.min_nodes is 0 or the engine does not know it."""
        return self.engine.available(Demand.of(self.run), without) if self.run.gang.min_nodes else None

    def smaller(self, without: tuple[str, ...]) -> tuple[Run, int] | None:
        """The run on fewer hosts, and the number of available hosts; None if the gang waits for all hosts."""
        left = self.available(without)
        if left is None or left >= self.run.layout.nodes:
            return None
        run = next_step.fewer(self.run, left, self.fits)
        return (run, left) if run else None
