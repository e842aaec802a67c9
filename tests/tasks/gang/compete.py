"""Gangs that reach for the same hosts, in random trials, without training: do all of them get hosts in the end?

    python -m tests.tasks.gang.compete [TRIALS] [--seed N] [--at-once N] [--no-turn]

Real are the controller, its turn, the board, leases and the members' side of the board; all of their times are divided
by FASTER. The engine is a pool like Prefect's: it counts free hosts, and starts what is put into its queue where a host
gets free. In each trial 2 to 4 gangs of random sizes arrive at random moments; hosts die while gangs gather, and others
come in their place; controllers die silently while they hold the turn, and others follow them. Right is a trial in
which every gang has trained, never two gathered at once, and no host is held. Exit code 1 if one is not.

Not covered: engines that start all or nothing by themselves (Slurm, Kubernetes).
"""

import argparse
import collections
import json
import os
import random
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema.run import Run
from contract.faults import Fault
from tasks.gang import attempt, controller, controller_link, member_link, spare_hosts
from tasks.gang import board as boards
from tasks.gang.attempt import Gang
from tasks.gang.board import Board
from tasks.gang.engines import Demand
from tasks.gang.history.timeline import History, Teller
from tasks.gang.job import Training
from tasks.gang.member_link import Link
from tasks.gang.messages import Member
from tasks.run import lease
from tasks.run.launch import Broken
from tasks.store import Store, open_store

FASTER = 20.0
ENDS_WITHIN = 60.0  # seconds for a trial
TIMES = {
    boards: ("RENEWED", "POLLED", "STALE"),
    member_link: ("RENEWED", "POLLED", "STALE", "SHIPPED", "WITNESS_AFTER"),
    controller_link: ("AWAY",),
    attempt: ("TICK", "CAPACITY_POLL", "STALE", "ENDED_BY_ITSELF"),
    controller: ("TICK", "SETTLE", "ENDED_BY_ITSELF"),
    spare_hosts: ("LOOKED", "STALE"),
    lease: ("RENEWED", "EXPIRES", "POLLED"),
}
CONF = """
name: {name}
model: {{source: none}}
data: {{seq_length: 64, template: "{{input}} {{output}}"}}
train: {{steps: 1, global_batch: 840, micro_batch: 1, precision: fp32}}
optimizer: {{lr: 1e-3}}
checkpoint: {{save_every: 1}}
gang: {{start_within: 1, retries: 100}}
layout: {{nodes: {nodes}}}
paths:
  {{model: none, base: none, data: none, output: "{folder}/{name}", logs: "{folder}/{name}", parity: none,
  evaluation: "{folder}/{name}/answers"}}
"""


class Dead(BaseException):
    """A controller's thread ends so, where its process would be gone."""


class Mortal:
    """The store as one process has it: once it is dead, nothing gets there any more."""

    def __init__(self, store: Store, uri: str, dies_after: float | None = None):
        self.store, self.uri, self.dies_after, self.dead = store, uri, dies_after, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.dead.is_set():
            raise OSError(f"{self.uri} is dead")
        return getattr(self.store, name)


@dataclass
class Place:
    """One member's: in the queue, on a host, over."""

    attempt: Board
    node: int
    output: str
    seconds: float  # that training takes
    taken: bool = False
    over: bool = False
    lost: bool = False  # with its host: the engine does not know


@dataclass
class Handle:
    """Of a gang's attempt, as the engine gives it to the controller."""

    store: Mortal
    places: list[Place]
    cancelled: bool = False

    @property
    def gathers(self) -> bool:
        return not (self.cancelled or self.store.dead.is_set() or all(place.taken for place in self.places))

    def alive(self) -> dict[int, bool | None]:
        return {place.node: None if place.lost else not place.over for place in self.places}

    def waits(self) -> str | None:
        return None

    def words(self) -> tuple[str, ...]:
        return ()

    def cancel(self) -> None:
        if not self.store.dead.is_set():
            self.cancelled = True
            for place in self.places:
                place.over = place.over or not place.taken


@dataclass
class Pool:
    """An engine, and the hosts behind it."""

    store: Store
    hosts: int
    deaths: int
    random: random.Random
    turns: bool = True
    queue: collections.deque[Place] = field(default_factory=collections.deque)
    busy: set[int] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    names: collections.Counter[int] = field(default_factory=collections.Counter)
    handles: list[Handle] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)  # by the name of the run
    wrong: list[str] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    def turn(self, demand: Demand) -> str | None:
        return "pool" if self.turns else None

    def capacity(self, demand: Demand, without: tuple[str, ...] = ()) -> str | None:
        free = self.hosts - len(self.busy | self.down)
        return None if free >= demand.nodes else f"{demand.nodes}, where {free} are free"

    def start(self, demand: Demand, attempt: Board, n: int, without: tuple[str, ...] = ()) -> Handle:
        store: Any = attempt.store
        if store.dead.is_set():
            raise Dead
        if any(handle.gathers for handle in self.handles):
            self.wrong.append(f"{demand.name} gathers while another does")
        seconds, real = self.random.uniform(0, 0.3), Board(self.store, attempt.gang, attempt.attempt)
        self.handles.append(Handle(store, [Place(real, node, self.outputs[demand.name], seconds) for node in range(n)]))
        for place in self.handles[-1].places:
            self.queue.append(place)
            time.sleep(0.01)  # as a request to a server takes
        if store.dies_after is not None:
            threading.Timer(store.dies_after, store.dead.set).start()
        if self.deaths and self.random.random() < 0.5:
            self.deaths -= 1
            threading.Timer(self.random.uniform(0, 0.3), self.kill, (self.random.randrange(self.hosts),)).start()
        return self.handles[-1]

    def kill(self, host: int) -> None:
        self.down.add(host)
        time.sleep(self.random.uniform(0.2, 1.5))
        self.names[host] += 1  # another one in its place
        self.down.discard(host)

    def serve(self, host: int) -> None:
        """What a worker does: one member after the other."""
        while not self.closed.is_set():
            try:
                place = None if host in self.down else self.queue.popleft()
            except IndexError:
                place = None
            if place is None or place.over:
                time.sleep(0.02)
                continue
            self.busy.add(host)
            place.taken = True
            place.lost = self.member(host, place)
            place.over = True
            self.busy.discard(host)

    def member(self, host: int, place: Place) -> bool:
        """Whether the host has died under it."""
        time.sleep(self.random.uniform(0, 0.15))
        found = place.attempt.pulse()
        try:
            probe = Path(found[0].probe).read_text() if found else ""
        except OSError:  # its controller is over already
            probe = ""
        name = f"host{host}-{self.names[host]}"
        me = Member(f"{host} {place.attempt.place}", name, "waiting", f"10.0.0.{host}", 1, 2, probe)
        store = Mortal(self.store, name)
        one = Link(Board(store, place.attempt.gang, place.attempt.attempt), place.node, me)  # type: ignore[arg-type]
        if not probe or not one.join():
            return False
        began, last = None, {}
        while not last:
            time.sleep(0.02)
            if host in self.down:
                store.dead.set()
                one.end(0)
                return True
            if why := one.why_stop():
                last = {"state": "stopped", "reason": why}
            elif began is None and one.word.state == "go":
                began = time.monotonic()
                one.say(state="running")
            elif began is not None and time.monotonic() - began > place.seconds:
                mark = Path(place.output) / "checkpoints/iter_0000001/complete.json"
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.write_text(json.dumps({"files": {}}))
                last = {"state": "done"}
        one.say(**last, over=True)
        one.end(5)
        return False


@dataclass(frozen=True)
class Result:
    gangs: int
    controllers: int  # that died
    hosts: int
    seconds: float
    wrong: list[str]


STORES: dict[str, Mortal] = {}
POOLS: dict[str, Pool] = {}


def trial(seed: int, turns: bool) -> Result:
    chance, began = random.Random(seed), time.monotonic()
    hosts, deaths = chance.randint(2, 6), chance.randint(0, 2)
    with tempfile.TemporaryDirectory(prefix="compete-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        pool = Pool(open_store(f"{folder}/store"), hosts, deaths, random.Random(seed), turns)
        workers = [threading.Thread(target=pool.serve, args=(host,), daemon=True) for host in range(hosts)]
        sizes = [chance.randint(hosts // 2 + 1, hosts), chance.randint(hosts // 2, hosts)]
        sizes += [chance.randint(1, hosts) for _ in range(chance.randint(0, 2))]
        gangs, killed = [], 0
        for number, size in enumerate(sizes):
            conf = Path(folder, f"gang{number}.yaml")
            conf.write_text(CONF.format(name=f"gang{number}", nodes=size, folder=folder))
            run = load(conf)
            pool.outputs[run.name] = run.paths.output
            run = run.model_copy(update={"gang": run.gang.model_copy(update={"silent_after": 12 / FASTER})})
            dies_after = chance.uniform(0, 0.4) if chance.random() < 0.3 else None
            killed += dies_after is not None
            work = (pool, run, Path(folder), chance.uniform(0, 0.5), dies_after)
            gangs.append(threading.Thread(target=gang, args=work, daemon=True))
        for thread in (*workers, *gangs):
            thread.start()
        until = time.monotonic() + ENDS_WITHIN
        for number, thread in enumerate(gangs):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                pool.wrong.append(f"gang{number} of {sizes[number]} of {hosts} hosts waits for ever")
        while (pool.busy or any(not place.over for place in pool.queue)) and time.monotonic() < until:
            time.sleep(0.05)
        pool.wrong += [f"host {host} is held after the end" for host in pool.busy]
        pool.closed.set()
        return Result(len(sizes), killed, deaths - pool.deaths, time.monotonic() - began, pool.wrong)


def gang(pool: Pool, run: Run, folder: Path, arrives: float, dies_after: float | None) -> None:
    time.sleep(arrives)
    if dies_after is not None:
        first = Mortal(pool.store, f"{folder}/{run.name}/first", dies_after)
        threading.Thread(target=control, args=(pool, run, folder, first), daemon=True).start()
        first.dead.wait(ENDS_WITHIN)
        time.sleep(arrives)
    control(pool, run, folder, Mortal(pool.store, f"{folder}/{run.name}/last"))


def control(pool: Pool, run: Run, folder: Path, store: Mortal) -> None:
    def stop() -> bool:
        if store.dead.is_set():
            raise Dead
        return False

    work = folder / store.uri.replace("/", "-")
    work.mkdir()
    try:
        teller = Teller(History(run.name, run.name, ""), work / "files/metrics.jsonl")
        job: Any = Training(run)
        controller.carry_out(Gang(run.name, work, job, store, pool, teller, lambda line: None, stop))  # type: ignore[arg-type]
    except (Fault, Broken) as error:
        pool.wrong.append(f"{run.name}: {error}")
    except (Dead, OSError) as error:
        if not store.dead.is_set():
            pool.wrong.append(f"{run.name}: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tasks.gang.compete", description=__doc__.partition("\n")[0])
    parser.add_argument("trials", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--no-turn", action="store_true", help="to see that it would be noticed")
    options = parser.parse_args()
    for module, names in TIMES.items():
        for name in names:
            setattr(module, name, getattr(module, name) / FASTER)
    began, seeds = time.monotonic(), range(options.seed, options.seed + options.trials)
    with ThreadPoolExecutor(options.at_once) as at_once:
        results = list(at_once.map(lambda seed: trial(seed, not options.no_turn), seeds))
    for seed, result in zip(seeds, results, strict=True):
        for line in result.wrong:
            print(f"trial {seed}: {line}")
    died = f"{sum(r.hosts for r in results)} hosts and {sum(r.controllers for r in results)} controllers died"
    wrong = sum(bool(result.wrong) for result in results)
    print(
        f"{len(results)} trials of {sum(r.gangs for r in results)} gangs, {died}: {wrong} wrong; "
        f"the longest took {max(r.seconds for r in results):.1f} s, all {time.monotonic() - began:.0f} s"
    )
    sys.stdout.flush()
    os._exit(bool(wrong))  # threads of dead controllers, and of what waits for ever


if __name__ == "__main__":
    main()
