"""Cost of the control path of a gang with many hosts, simulated on this host, and the time to notice a dead host.

    python -m benchmarks.gang_scale [NODES] [--minutes M]         make scale: 1000 nodes
    python -m benchmarks.gang_scale --short      200 nodes, a quarter of a minute: 1 minute      make scale SHORT=1

The controller is real, and so is the work of each member on the board (tasks/gang/member_link.py): it reads the
controller's word each second, renews every 3 s, ships a growing log, and reports 8 ranks every 10 s. Nothing trains.
The store is a folder in memory. M minutes after all members report training, one host dies silently.

The output has the seconds until all have joined, until all have read go, from the death to the verdict, and from the
verdict until all others have stopped; the cores that the controller used, and that all members used together; the
requests to the store while all train, with the price of a day at Amazon S3; and the objects on the board. The exit code
is 1 if the controller used a tenth of a core, or if the death was noticed only after 30 s. The members need most of a
core. On a busy machine they renew late and count as dead: use a better priority there.

Not covered: the latency of an object store, and copies of checkpoints.
"""

# pyright: reportOptionalMemberAccess=false

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.workspace import workspace
from conf.load import load
from conf.schema.run import Run
from contract.files import write_atomically
from tasks.gang import attempt, controller, messages
from tasks.gang.attempt import Gang
from tasks.gang.board import POLLED, RENEWED, Board
from tasks.gang.controller_link import Lookout
from tasks.gang.history.timeline import History, Teller
from tasks.gang.job import Training
from tasks.gang.member_link import SHIPPED, Link
from tasks.run.launch import Broken
from tasks.store import Store, open_store
from tests.tasks.gang.conftest import ROOT

RANKS = 8
PRICES = {"GET": 0.4e-6, "PUT": 5e-6, "LIST": 5e-6}  # USD a request: Amazon S3 Standard, us-east-1, November 2026
LISTED = 1000  # keys that one LIST returns
TOLD = 10.0  # as tasks/gang/member.py
PROCESSES = 4  # for the members; the member that dies has its own process
CONF = """
name: scale
model: {{source: none}}
data: {{seq_length: 64, template: "{{input}} {{output}}"}}
train: {{steps: 1, global_batch: {nodes}, micro_batch: 1, precision: fp32}}
optimizer: {{lr: 1e-3}}
checkpoint: {{save_every: 1}}
gang: {{start_within: 300, retries: 0}}
layout: {{nodes: {nodes}}}
paths: {{model: none, base: none, data: none, output: "{folder}/out", logs: "{folder}/logs", parity: none}}
"""


@dataclass
class Found:
    joined: float = 0.0
    went: float = 0.0
    noticed: float = 0.0
    stopped: float = 0.0
    controller: float = 0.0  # cores
    members: float = 0.0
    requests: dict[str, float] = field(default_factory=dict)  # a second, of all processes
    objects: int = 0
    verdict: str = ""


class Requests:
    """Store that counts its requests; each second it writes them to a file in this folder."""

    def __init__(self, store: Store, folder: Path):
        self.store, self.file, self.written = store, folder / str(os.getpid()), 0.0
        self.counts, self.turn = dict.fromkeys(PRICES, 0), threading.Lock()

    def read(self, key: str) -> tuple[bytes, str] | None:
        self._count("GET")
        return self.store.read(key)

    def keys(self, prefix: str) -> dict[str, tuple[int, str]]:
        found = self.store.keys(prefix)
        self._count("LIST", max(1, -(-len(found) // LISTED)))
        return found

    def create(self, key: str, data: bytes) -> str | None:
        self._count("PUT")
        return self.store.create(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        self._count("PUT")
        return self.store.replace(key, data, tag)

    def write(self, key: str, data: bytes) -> str:
        self._count("PUT")
        return self.store.write(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def _count(self, kind: str, number: int = 1) -> None:
        with self.turn:
            self.counts[kind] += number
            if time.monotonic() - self.written > 1:
                self.written = time.monotonic()
                write_atomically(self.file, json.dumps(self.counts), durable=False)


def requests(folder: Path) -> Counter[str]:
    return sum((Counter(json.loads(file.read_text())) for file in folder.iterdir()), Counter())


class Engine:
    """Engine that starts members in a few processes, and does not know their state."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []

    def turn(self, run: Run) -> str | None:
        return None

    def capacity(self, run: Run, without: tuple[str, ...] = ()) -> str | None:
        return None

    def available(self, run: Run, without: tuple[str, ...] = ()) -> int | None:
        return None

    def start(self, run: Run, board: Board, n: int, without: tuple[str, ...] = ()) -> "Engine":
        cuts = [(n - 1) * k // PROCESSES for k in range(PROCESSES + 1)] + [n]
        for first, end in itertools.pairwise(cuts):
            where = [board.store.uri, board.gang, str(board.attempt), str(first), str(end), str(self.folder)]
            line = [sys.executable, "-m", "benchmarks.gang_scale", "--members", *where]
            self.processes.append(subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE))
        return self

    def alive(self) -> dict[int, bool | None]:
        return {}

    def waits(self) -> str | None:
        return None

    def words(self) -> tuple[str, ...]:
        return ()

    def cancel(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(60)

    def seconds(self) -> float:
        """Seconds of processor time so far."""
        used = [psutil.Process(process.pid).cpu_times() for process in self.processes if process.poll() is None]
        return sum(one.user + one.system for one in used)


class Member(Link):
    """Member as in tasks/gang/member_link.py, but without threads: 2000 threads would wait for each other here."""

    def join(self) -> bool:
        found = self.board.pulse()
        assert found is not None
        self.word, self._word_tag = found
        self.beat, self.renewed, self.shipped = 0, -random.uniform(0, RENEWED), -random.uniform(0, SHIPPED)
        self.due = 0.0
        return self.create()

    def work(self) -> None:
        now = time.monotonic()
        self._read()
        if self._unsaid:
            self._send()
        if now - self.renewed > RENEWED:
            self.beat, self.renewed = self.beat + 1, now
            self.board.write(f"beats/{self.node}", str(self.beat).encode())
        if now - self.shipped > SHIPPED:
            self.shipped = now
            self._ship()

    def train(self, log: Path) -> None:
        """Write the messages of a training member at this moment."""
        now, step = time.monotonic(), int(time.monotonic())
        first = self.node * RANKS
        if not self.due:
            self.due = now + random.uniform(0, TOLD)
            self.logs = {f"rank{first:05d}.out": log}
            self.say(state="running")
        elif now > self.due:
            self.due += TOLD
            self.say(free=10**12, ranks=tuple(_sign(rank, step) for rank in range(first, first + RANKS)))
        with log.open("a") as file:
            file.write(f"step {step}, loss 1.0\n")


def members(uri: str, gang: str, attempt: str, first: str, end: str, folder: str) -> int:
    """Run members first to end - 1 until standard input ends. Each looks at the board once in POLLED seconds."""
    closed = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    board = Board(
        cast(Store, Requests(open_store(uri, hasty=True), Path(folder).with_name("requests"))), gang, int(attempt)
    )
    found = board.pulse()
    assert found is not None
    probe, here = Path(found[0].probe).read_text(), []
    for node in range(int(first), int(end)):
        address = f"10.0.{node // 256}.{node % 256}"
        me = messages.Member(str(node), f"host{node:04d}", "waiting", address, 4000, 4001, probe)
        here.append(Member(board, node, me))
        assert here[-1].join(), node
    began, turns = time.monotonic(), 0
    while here and not closed.is_set():
        for place, one in enumerate(now := list(here)):
            time.sleep(max(0.0, began + (turns + place / len(now)) * POLLED - time.monotonic()))
            one.work()
            if why := one.why_stop():
                one.say(state="stopped", reason=why, over=True)
                one.work()
                here.remove(one)
            elif one.word.state == "go":
                one.train(Path(folder) / f"node{one.node}.log")
        turns = max(turns + 1, int((time.monotonic() - began) / POLLED))
    return 0


def _sign(rank: int, step: int) -> messages.Sign:
    return messages.Sign(rank, rank, step, "training", age=0.5, idle=0.5, state="S", silent=False, stalled=False)


class Seen(Lookout):
    """Messages of the controller, with the time of each."""

    last: "Seen"

    def __init__(self, board: Board, probe: str, say: Callable[[str], None], quick: bool = False):
        self.at: dict[str, float] = {}
        super().__init__(board, probe, say, quick)  # announces the attempt
        Seen.last = self

    def say(self, **news) -> None:
        self.at.setdefault(news.get("state", ""), time.monotonic())
        super().say(**news)

    def all(self, state: str, but: int = 0) -> float:
        """Return the time at which all members except `but` had this state."""
        while sum(one.state == state for one in self.nodes.values()) < len(self.nodes) - but:
            time.sleep(0.1)
        return time.monotonic()


def measure(nodes: int, seconds: float, folder: Path) -> Found:
    found, engine = Found(), Engine(folder / "logs")
    for name in ("logs", "out", "work", "requests"):
        (folder / name).mkdir()
    (folder / "conf.yaml").write_text(CONF.format(nodes=nodes, folder=folder))
    store = cast(Store, Requests(open_store(str(folder / "store")), folder / "requests"))
    began, went = time.monotonic(), threading.Event()

    def cores() -> tuple[float, float]:
        own = time.process_time()
        return own, engine.seconds()

    def watch() -> None:
        went.wait()
        seen = Seen.last
        found.joined, found.went = seen.at["go"] - began, seen.all("running") - seen.at["go"]
        print(f"{found.joined:.1f} s until all had joined, {found.went:.1f} s until all had heard go", flush=True)
        since, before, asked = time.monotonic(), cores(), requests(folder / "requests")
        time.sleep(seconds)
        passed, after = time.monotonic() - since, cores()
        asked = requests(folder / "requests") - asked
        found.controller, found.members = ((after[k] - before[k]) / passed for k in (0, 1))
        found.requests = {kind: asked[kind] / passed for kind in PRICES}
        found.objects = len(store.keys(seen.board.place))
        print(f"{found.controller:.2f} cores the controller, {found.members:.2f} all members", flush=True)
        dead = time.monotonic()
        engine.processes[-1].kill()
        stopped = seen.all("stopped", but=1)
        found.noticed, found.stopped = seen.at["stop"] - dead, stopped - seen.at["stop"]
        print(
            f"{found.noticed:.1f} s from a death to the verdict, {found.stopped:.1f} s until all others had stopped",
            flush=True,
        )

    def say(line: str) -> None:
        if "train; logs" in line:
            went.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    attempt.Lookout = Seen
    job, work = Training(load(folder / "conf.yaml")), folder / "work"
    teller = Teller(History("scale", "scale", ""), work / "none")
    try:
        controller.carry_out(Gang("scale", work, job, store, cast(Any, engine), teller, say, lambda: False))
    except Broken as error:
        found.verdict = str(error)
    watcher.join(10)
    return found


def main() -> int:
    if sys.argv[1:2] == ["--members"]:
        return members(*sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gang_scale", description=__doc__.partition("\n")[0])
    parser.add_argument("nodes", nargs="?", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1.0, help="of training before a host dies")
    parser.add_argument("--short", action="store_true", help="as 200 --minutes 0.25")
    options = parser.parse_args()
    if options.short:
        options.nodes, options.minutes = 200, 0.25
    print(f"{options.nodes} nodes on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with workspace("scale", "/dev/shm") as folder:
        found = measure(options.nodes, 60 * options.minutes, folder)
    day = 86400 * sum(found.requests.get(kind, 0) * price for kind, price in PRICES.items())
    rates = ", ".join(f"{rate:.0f} {kind}" for kind, rate in found.requests.items())
    print(
        f"requests a second: {rates}; {day:.0f} USD a day\nobjects on the board: {found.objects}\n{found.verdict[:200]}"
    )
    died = f"host{options.nodes - 1:04d}"
    return 0 if died in found.verdict and 0 < found.noticed < 30 and 0 < found.controller < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
