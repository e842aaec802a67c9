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
SAVES = "work/train-*/files/checkpoints/iter_*"


@dataclass(frozen=True)
class Fault:
    do: Callable[[World], None]
    steps: int = 24  # that a run makes meanwhile, and what it loses
    goes_on: bool = False  # nothing is to be noticed, and nothing lost
    again: bool = False  # whoever started the flow starts it again
    apart: bool = False  # only for hosts with a disk each


def busy(made: World) -> list[int]:
    """Hosts that train, without a spare one."""
    return [host for host in made.workers if made.ranks(host)]


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


def lose_hosts(made: World, count: int) -> None:
    """They and their disks are gone for good; others with their names and empty disks come later."""
    for host in random.sample(busy(made), count):
        made.lose_host(host)
        later(BACK["host"], lambda host=host: made.join(host))


def silence_store_while_copying(made: World) -> None:
    """As soon as the next checkpoint is marked on a host."""
    before = _marks(made)
    _wait_until(lambda: bool(_marks(made) - before), "no save")
    silence_store(made)


def _marks(made: World) -> set[Path]:
    return {path for host in made.workers for path in made.runs(host).glob(f"{SAVES}/complete.json")}


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

    def half() -> bool:
        found = [path for host in made.workers for path in made.runs(host).glob(SAVES)]
        marked = {path.name for path in found if (path / "complete.json").exists()}
        return any(path.name not in marked for path in found)

    def still_half() -> bool:
        return half() and (time.sleep(random.uniform(0, 0.1)) or half())

    _wait_until(still_half, "no save")
    signal_rank(made, 9)


def _wait_until(happened: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + HALF_WITHIN
    while not happened():
        assert time.monotonic() < until, f"{what} within {HALF_WITHIN:.0f} s"
        time.sleep(0.002)


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
    "host and disk lost": Fault(lambda made: lose_hosts(made, 1), steps=30, apart=True),
    "two hosts lost": Fault(lambda made: lose_hosts(made, 2), steps=30, apart=True),
    "store away in a copy": Fault(silence_store_while_copying, steps=200, goes_on=True, apart=True),
}
