"""What can happen to a gang on hosts as tests/tasks/gang/world.py makes them: FAULTS, by name; do(world) does it
once."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.tasks.gang.world import World

OUTAGE = 60.0
BACK = {"worker": 20.0, "disk": 30.0, "host": 45.0, "server": 5.0}  # seconds after which somebody has mended it
HALF_WITHIN = 60.0


@dataclass(frozen=True)
class Fault:
    do: Callable[[World], None]
    steps: int = 24  # that a run makes meanwhile, and what it loses
    goes_on: bool = False  # nothing is to be noticed, and nothing lost
    again: bool = False  # whoever started the flow starts it again


def busy(made: World) -> list[int]:
    return [host for host in made.workers if made.members(host)]


def signal_rank(made: World, number: int) -> None:
    random.choice(made.ranks(random.choice(busy(made)))).send_signal(number)


def kill_worker(made: World) -> None:
    host = random.choice(busy(made))
    made.workers[host].kill()
    made.workers[host].wait()
    later(BACK["worker"], lambda: made.work(host))


def remove_host(made: World) -> None:
    host = random.choice(busy(made))
    made.kill_host(host)
    later(BACK["host"], lambda: made.join(host))


def partition(made: World) -> None:
    host = random.choice(busy(made))
    made.cut(host)
    later(OUTAGE, lambda: made.heal(host))


def fill_disk(made: World) -> None:
    host = random.choice(busy(made))
    made.fill(host)
    later(BACK["disk"], lambda: made.empty(host))


def restart_prefect(made: World) -> None:
    server = made.servers["prefect"]
    for process in [*server.children(recursive=True), server]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    later(BACK["server"], made.serve)


def silence_store(made: World) -> None:
    made.servers["s3"].suspend()
    later(OUTAGE, made.servers["s3"].resume)


def kill_while_saving(made: World) -> None:
    """Somewhere in the next save."""
    saves = Path(made.environment["FINETUNE_RUNS"]) / "work"

    def half() -> bool:
        found = saves.glob("train-*/files/checkpoints/iter_*")
        return any(not (path / "complete.json").exists() for path in found)

    until = time.monotonic() + HALF_WITHIN
    while True:
        assert time.monotonic() < until, f"no save within {HALF_WITHIN:.0f} s"
        if half():
            time.sleep(random.uniform(0, 0.1))
            if half():
                break
        time.sleep(0.002)
    signal_rank(made, 9)


def kill_flow(made: World) -> None:
    made.running.kill()
    made.running.wait()


def cancel(made: World) -> None:
    made.running.terminate()  # SIGINT is ignored by what a shell starts in the background


def later(seconds: float, what: Callable[[], None]) -> None:
    PENDING.append(threading.Timer(seconds, what))
    PENDING[-1].start()


def mended() -> None:
    """Returns once all that was to be mended later is."""
    while PENDING:
        PENDING.pop().join()


PENDING: list[threading.Timer] = []
FAULTS: dict[str, Fault] = {
    "rank crash": Fault(lambda made: signal_rank(made, 6)),  # as its own defect would: an abort
    "rank SIGKILL": Fault(lambda made: signal_rank(made, 9)),
    "rank SIGSTOP": Fault(lambda made: signal_rank(made, 19)),
    "worker SIGKILL": Fault(kill_worker),
    "flow SIGKILL": Fault(kill_flow, steps=60, again=True),
    "host removed": Fault(remove_host, steps=30),
    "partition, 60 s": Fault(partition, steps=30),
    "Prefect restart": Fault(restart_prefect, steps=40, goes_on=True),
    "store away, 60 s": Fault(silence_store, steps=200, goes_on=True),
    "killed in a save": Fault(kill_while_saving, steps=32),
    "disk full": Fault(fill_disk, steps=40),
    "cancel": Fault(cancel, again=True),
}
