"""What happens to gangs, and what becomes of them: a table of faults, each at a random moment of a real run.

    python -m tests.gang.faults [N] [--only NAME ...] [--seed N]        N times each; make faults N=1

Three hosts of four (tests/gang/world.py), tiny GLM-4-MoE, a checkpoint every 10 steps. For each fault: seconds until it
is noticed (the controller's word on the board says stop), until no process of the attempt is left anywhere, and until
the next step is made; how many steps were made twice; processes left after the end. Right is a run that ends with every
step once and the losses of an undisturbed run. Exit code 1 if any is not. About 2 minutes a fault on 2 cores.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil

from tasks.gang.board import Board, newest_attempt
from tasks.store import open_store
from tests.flows.world import wait_for
from tests.gang.conftest import same
from tests.gang.world import World, missing, world

STEPS = 80
OUTAGE = 60.0
RUN = ("--from", "train", "--until", "train", f"train.steps={STEPS}", "layout.nodes=3")
HOSTS = 4


@dataclass
class Row:
    fault: str
    ended: str = "no"
    noticed: float | None = None
    clean: float | None = None
    resumed: float | None = None
    lost: int | None = None
    attempts: int = 0
    orphans: int = 0
    difference: float | None = None
    says: str = ""

    @property
    def right(self) -> bool:
        quick = all((seconds or 0) < 30 for seconds in (self.noticed, self.clean))
        return self.ended == "yes" and not self.orphans and quick and (self.lost or 0) <= 20


def busy(made: World) -> list[int]:
    return [host for host in made.workers if made.members(host)]


def signal_rank(made: World, number: int) -> None:
    random.choice(made.ranks(random.choice(busy(made)))).send_signal(number)


def crash_rank(made: World) -> None:
    """As its own defect would: an abort."""
    signal_rank(made, 6)


def kill_rank(made: World) -> None:
    signal_rank(made, 9)


def stop_rank(made: World) -> None:
    signal_rank(made, 19)


def kill_member(made: World) -> None:
    made.members(random.choice(busy(made)))[0].kill()


def kill_worker(made: World) -> None:
    host = random.choice(busy(made))
    made.workers[host].kill()
    made.workers[host].wait()
    later(20, lambda: made.work(host))


def remove_host(made: World) -> None:
    host = random.choice(busy(made))
    made.kill_host(host)
    later(45, lambda: made.join(host))


def partition(made: World) -> None:
    host = random.choice(busy(made))
    made.cut(host)
    later(OUTAGE, lambda: made.heal(host))


def restart_prefect(made: World) -> None:
    server = made.servers["prefect"]
    for process in [*server.children(recursive=True), server]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    later(5, made.serve)


def silence_store(made: World) -> None:
    made.servers["s3"].suspend()
    later(OUTAGE, made.servers["s3"].resume)


def kill_while_saving(made: World) -> None:
    folder = Path(made.environment["FINETUNE_RUNS"])

    def half() -> bool:
        saves = folder.glob("work/train-*/files/checkpoints/iter_*")
        return any(not (path / "complete.json").exists() for path in saves)

    until = time.monotonic() + 60
    while not half():
        assert time.monotonic() < until
        time.sleep(0.002)
    kill_rank(made)


def kill_flow(made: World) -> None:
    made.running.kill()
    made.running.wait()


def cancel(made: World) -> None:
    made.running.send_signal(signal.SIGTERM)  # SIGINT is ignored by what a shell starts in the background


def later(seconds: float, what: Callable[[], None]) -> None:
    thread = threading.Timer(seconds, what)
    LATER.append(thread)
    thread.start()


LATER: list[threading.Timer] = []
FAULTS: dict[str, Callable[[World], None]] = {
    "rank crash": crash_rank,
    "rank SIGKILL": kill_rank,
    "rank SIGSTOP": stop_rank,
    "member SIGKILL": kill_member,
    "worker SIGKILL": kill_worker,
    "flow SIGKILL": kill_flow,
    "host removed": remove_host,
    "partition, 60 s": partition,
    "Prefect restart": restart_prefect,
    "store away, 60 s": silence_store,
    "killed in a save": kill_while_saving,
    "cancel": cancel,
}
GOES_ON = ("Prefect restart", "store away, 60 s")  # nothing is to be noticed, and nothing lost
STARTED_AGAIN = ("flow SIGKILL", "cancel")  # by whoever started it


def main() -> int:
    options = _arguments()
    if why := missing():
        print(f"skipped: {why}")
        return 0
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    rows = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, world(Path(folder), HOSTS) as made:
        first = made.flow(*RUN)
        expected: dict[int, float] = {}
        while first.poll() is None:
            expected = losses(made) or expected
            time.sleep(0.3)
        assert first.returncode == 0, (made.folder / "flow.log").read_text()
        expected |= losses_in_store(made)
        print(HEAD, flush=True)
        for name in options.only or FAULTS:
            for _ in range(options.times):
                rows.append(_one(made, name, expected))
                print(_line(rows[-1]), flush=True)
                if not rows[-1].right:
                    keep = Path(tempfile.gettempdir()) / f"fault-{name.replace(' ', '-')}.log"
                    keep.write_text((made.folder / "flow.log").read_text())
                    print(f"its log: {keep}", file=sys.stderr, flush=True)
    return 0 if all(row.right for row in rows) else 1


def _one(made: World, name: str, expected: dict[int, float]) -> Row:
    row, moment = Row(name), random.randint(11, 30)
    (made.folder / "flow.log").unlink(missing_ok=True)
    made.running = made.flow(*RUN)
    wait_for(lambda: made.step() >= moment or made.running.poll() is not None, 120)
    attempt = _attempt(made)
    before, at = made.training(), made.step()
    began, wall = time.monotonic(), time.time()
    FAULTS[name](made)
    if name == "killed in a save":
        began, wall, at = time.monotonic(), time.time(), made.step()
    watcher = threading.Thread(target=_notice, args=(made, attempt, row, began), daemon=True)
    if name not in GOES_ON:
        watcher.start()
        _, alive = psutil.wait_procs(before, 60)
        row.clean = time.monotonic() - began
        row.orphans += len(alive)
    if name in STARTED_AGAIN:
        made.running.wait(60)
        made.running = made.flow(*RUN)
    try:
        while made.running.poll() is None and time.monotonic() - began < 600:
            _see_resumed(made, row, wall, at)
            time.sleep(0.3)
    finally:
        made.running.kill()
    for thread in LATER:
        thread.join()
    LATER.clear()
    found = losses_in_store(made)
    row.attempts = _attempt(made) - attempt + 1
    ended = made.running.wait() == 0 and found.keys() == expected.keys()
    row.ended = "yes" if ended and same(found, expected, 1e-3) else "other losses" if ended else "no"
    if ended:
        row.difference = max(abs(found[step] - expected[step]) / expected[step] for step in expected)
    with contextlib.suppress(TimeoutError):
        wait_for(lambda: not made.training(), 15)
    row.orphans += len(made.training())
    return row


def _notice(made: World, attempt: int, row: Row, began: float) -> None:
    with mock.patch.dict(os.environ, made.environment):
        board = Board(open_store(made.environment["FINETUNE_STORE"], hasty=True), _gang(made), attempt)
        while row.noticed is None and time.monotonic() - began < 90:
            with contextlib.suppress(Exception):
                word = board.read("gang.json") or {}
                stopped = any((board.read(f"nodes/{k}.json") or {}).get("reason") for k in range(3))
                if word.get("state") == "stop" or stopped:
                    row.noticed, row.says = time.monotonic() - began, word.get("reason", "")
            time.sleep(0.2)


def _see_resumed(made: World, row: Row, wall: float, at: int) -> None:
    if row.resumed is not None:
        return
    lines = made.lines()
    starts = [line for line in lines if line["kind"] == "start" and line["time"] > wall]
    if not starts:
        return
    steps = [line for line in lines if line["kind"] == "train" and line["time"] > starts[-1]["time"]]
    if steps:
        row.resumed = steps[0]["time"] - wall
        row.lost = max(0, at - starts[-1]["step"])


def losses(made: World) -> dict[int, float]:
    return {line["step"]: line["lm_loss"] for line in made.lines() if line["kind"] == "train"}


def losses_in_store(made: World) -> dict[int, float]:
    with mock.patch.dict(os.environ, made.environment):
        store = open_store(made.environment["FINETUNE_STORE"])
        found = store.read(f"{_gang(made).replace('-', '/', 1)}/files/metrics.jsonl")
    lines = [json.loads(line) for line in found[0].splitlines()] if found else []
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == len({line["step"] for line in steps})
    return {line["step"]: line["lm_loss"] for line in steps}


def _gang(made: World) -> str:
    """There is one, of all the runs here."""
    if not GANG:
        with mock.patch.dict(os.environ, made.environment):
            names = open_store(made.environment["FINETUNE_STORE"]).keys("gangs")
        GANG.append(next(name.partition("/")[0] for name in names if name.startswith("train-")))
    return GANG[0]


GANG: list[str] = []


def _attempt(made: World) -> int:
    with mock.patch.dict(os.environ, made.environment):
        return newest_attempt(open_store(made.environment["FINETUNE_STORE"]), _gang(made))


HEAD = (
    "| fault | ends right | noticed after | clean after | next step after | steps lost | attempts | orphans "
    "| largest difference | what it was |\n" + "|---" * 10 + "|"
)


def _line(row: Row) -> str:
    seconds = [f"{value:.1f} s" if value is not None else "" for value in (row.noticed, row.clean, row.resumed)]
    lost = "" if row.lost is None else row.lost
    difference = "" if row.difference is None else f"{row.difference:.1e}"
    cells = [row.fault, row.ended, *seconds, lost, row.attempts, row.orphans, difference, row.says]
    return "| " + " | ".join(map(str, cells)) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gang.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("times", metavar="N", type=int, nargs="?", default=5)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
