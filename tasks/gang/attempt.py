"""A gang, and the start of its attempts.

No attempt begins before all members of the last one have ended. It waits for enough free hosts, requests them, gathers
their members, and starts all at once.

If gang.min_nodes allows fewer hosts, the attempt takes the available hosts after gang.start_within, by the same rules
as after a failure (tasks/gang/diagnosis/next_step.py). A host that is up but in use counts as available.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from conf.load import as_yaml
from conf.network import rank_order
from conf.rules import schedule
from conf.schema.run import Run
from contract.faults import Fault, Stopped
from tasks.gang import results
from tasks.gang.board import STALE, Board, Watch, newest_attempt
from tasks.gang.collector import Collector
from tasks.gang.controller_link import Lookout
from tasks.gang.copies import Copies
from tasks.gang.diagnosis import next_step
from tasks.gang.diagnosis.classify import Failure
from tasks.gang.diagnosis.evidence import host_names
from tasks.gang.engines import Demand, Engine, Handle
from tasks.gang.history.timeline import Teller
from tasks.gang.job import Job
from tasks.gang.messages import Member, Peers
from tasks.run import lease
from tasks.run.places import runs_folder
from tasks.store import File, Store

TICK = 0.5
ENDED_BY_ITSELF = STALE + 10  # seconds after its last renewal within which a disconnected member ends in any case
LEAVE_WITHIN = 20.0
REJOIN_WITHIN = 15.0  # seconds in which members that stayed join the next attempt
CAPACITY_POLL = 3.0  # seconds between queries of the engine's capacity


@dataclass(frozen=True)
class Gang:
    """Everything that stays the same over the attempts of a gang."""

    name: str
    folder: Path
    job: Job  # on the configured number of hosts; an attempt may have fewer
    store: Store
    engine: Engine
    teller: Teller
    say: Callable[[str], None]
    stop: Callable[[], bool]
    tick: Callable[[], None] = lambda: None
    fits: next_step.Fits = next_step.never  # returns the run on fewer hosts
    advice: Callable[[Run], str] = lambda run: ""  # returns keys that need less memory than the run
    stored: dict[str, File] = field(default_factory=dict)  # files of a finished job that hosts have put into the store

    @property
    def run(self) -> Run:
        """The run on the configured number of hosts."""
        return self.job.run

    @property
    def copies(self) -> Copies:
        return Copies(self.store, self.name)

    def newest(self) -> int:
        """Step of the newest complete checkpoint: in the store, if hosts share no folder, else in the folder."""
        return self._answered(self.copies.newest) or self.job.newest()

    def is_done(self, board: Board) -> bool:
        """Whether the job is complete after an attempt that ended without a failure."""
        self._answered(lambda: results.fetch(board, self.folder / "files"))
        if step := self._answered(self.copies.newest):
            return schedule.is_over(self.run, step, self._answered(lambda: self.copies.mark(step)))
        return self.job.is_done()

    def deliver(self) -> None:
        """Give the flow what hosts that share no folder have made: small files, and names of those in the store."""
        if self._answered(self.copies.newest):
            self.stored.update(self._answered(lambda: self.copies.deliver(self.folder / "files")))

    def _answered[T](self, call: Callable[[], T]) -> T:
        """Repeat the call until the store answers. Each other reason is said once."""
        said = ""
        while True:
            try:
                return call()
            except Exception as error:
                if (line := f"waits for the store: {error}") != said:
                    self.say(said := line)
                self.pause(CAPACITY_POLL)

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


@dataclass(frozen=True)
class Outcome:
    """End of an attempt."""

    failure: Failure | None  # None if the job is done
    came: int | None = None  # number of available hosts, if too few joined in time
    kept: "Kept | None" = None  # the members that stay


@dataclass(frozen=True)
class Kept:
    """Members of an attempt that has ended. They stay until release(), or continue with the next attempt."""

    lookout: Lookout
    handle: Handle
    hosts: dict[int, str]  # their names
    order: tuple[int, ...]  # members that had ranks
    hung: bool  # one of the hosts may be broken

    @classmethod
    def of(cls, lookout: Lookout, handle: Handle, order: tuple[int, ...], failure: Failure) -> Self:
        hosts = {k: name for k, name in host_names(lookout).items() if lookout.nodes[k].over}
        return cls(lookout, handle, hosts, order, failure.kind == "hang")

    @property
    def measured(self) -> bool:
        """Whether the same hosts continue, which passed the check before; a spare host did not take part in it."""
        return not self.hung and {*self.order} <= {*self.hosts}

    def usable(self, without: tuple[str, ...]) -> "Kept":
        alive = self.handle.alive()
        hosts = {k: name for k, name in self.hosts.items() if name not in without and alive.get(k) is not False}
        return replace(self, hosts=hosts)

    def join(self, attempt: int) -> Handle:
        """Have them join the next attempt."""
        self.lookout.say(next=attempt, again=tuple(self.hosts))
        self.lookout.end(LEAVE_WITHIN)
        return self.handle

    def release(self) -> None:
        self.lookout.say(stays=False)
        self.handle.cancel()
        self.lookout.end(LEAVE_WITHIN)


def wait_for_the_last(gang: Gang) -> None:
    """Wait until all members that an earlier controller, of any version, has left running have ended.

    A member has ended if it reported so, or if it has been silent for so long that it must have stopped itself.
    """
    number = newest_attempt(gang.store, gang.name)
    board = Board(gang.store, gang.name, number)
    word = board.read("gang.json") if number else None
    if word is None or word.get("closed"):
        return
    word |= {"state": "stop", "stays": False, "reason": "its controller was replaced", "save": False}
    word["by"] = secrets.token_hex(8)
    board.write("gang.json", json.dumps(word).encode())
    gang.say(f"waits until attempt {number}, whose controller is gone, has ended")
    watch = Watch()
    watch.look(board.tags())
    while True:
        nodes = [name for name in watch.seen if name.startswith("nodes/")]
        left = [name for name in nodes if not (board.read(name) or {}).get("over")]
        beats = [f"beats/{name[6:-5]}" for name in left]
        if all(watch.age(beat) > ENDED_BY_ITSELF for beat in beats):
            break
        gang.pause(1.0)
        watch.look(board.tags())
    if word.get("copy", 0) > word.get("copied", 0):  # members may have finished a copy without the controller
        gang.copies.complete(word["copy"], board, word["order"])
    word["closed"] = True
    board.write("gang.json", json.dumps(word).encode())


@contextlib.contextmanager
def turn(gang: Gang, run: Run, without: tuple[str, ...]) -> Iterator[Run]:
    """Wait until enough hosts are free, and lock out other gangs until this gang has taken or released them.

    A gang waits for hosts without the lock, because a gang that needs many must not block one that needs few.
    """
    while True:
        run = _enough(gang, run, without)
        with alone(gang, Demand.of(run), gang.stop) as locked:
            if not locked or gang.engine.capacity(Demand.of(run), without) is None:
                yield run
                return


@contextlib.contextmanager
def alone(gang: Gang, demand: Demand, stop: Callable[[], bool]) -> Iterator[bool]:
    """Lock out other gangs that start members. Yields whether the engine needs that."""
    if (key := gang.engine.turn(demand)) is None:
        yield False
        return
    with lease.hold(gang.store, f"gangs/turns/{key}.json", gang.say, gang.name, stop):
        yield True


def _with_spares(gang: Gang, run: Run, without: tuple[str, ...]) -> Run:
    """The run with as many spare hosts as there are, up to gang.spares."""
    wanted = gang.run.gang.spares
    there = gang.engine.available(Demand.of(run), without) if wanted else None
    if there is None:
        return run
    return run.changed(gang={"spares": max(0, min(wanted, there - run.layout.nodes))})


def _enough(gang: Gang, run: Run, without: tuple[str, ...]) -> Run:
    """Wait until enough hosts are free. Returns the run, or the same run on fewer hosts."""
    reported, since = "", time.monotonic()
    while why := gang.engine.capacity(Demand.of(run := _with_spares(gang, run, without)), without):
        if why != reported:
            gang.say(f"waits for hosts: {why}")
            reported = why
        gang.pause(CAPACITY_POLL)
        if time.monotonic() - since > run.gang.start_within:
            smaller = gang.smaller(without)
            if smaller and smaller[0].layout.nodes < run.layout.nodes:
                gang.say(
                    f"{smaller[1]} of {gang.run.layout.nodes} hosts are available after {run.gang.start_within:.0f} s; "
                    f"continues with {smaller[0].layout.nodes}"
                )
            run = smaller[0] if smaller else gang.run
    return run


def announce(gang: Gang, run: Run, kept: Kept | None) -> tuple[Board, Lookout]:
    """Create the next attempt on the board. Hosts that were measured for the last one are not measured again."""
    token = secrets.token_hex(8)
    (gang.folder / "probe").write_text(token)
    number = newest_attempt(gang.store, gang.name)
    while True:
        number += 1
        board = Board(gang.store, gang.name, number)
        conf = gang.job.conf(run)
        conf = conf.changed(gang={"preflight": False}) if kept and kept.measured else conf
        board.write("resolved.yaml", as_yaml(conf).encode())
        board.write("task.json", gang.job.task(run).to_json())
        lookout = Lookout(board, str(gang.folder / "probe"), gang.say, quick=kept is not None)
        if lookout.begin():
            return board, lookout


def gather(
    gang: Gang, run: Run, without: tuple[str, ...], lookout: Lookout, handle: Handle, kept: Kept | None
) -> Outcome | None:
    """Wait until all members have joined. Returns the outcome if they do not join in time, or if one ends first."""
    start_within = REJOIN_WITHIN if kept else run.gang.start_within
    members = {*(kept.hosts if kept else range(run.layout.nodes + run.gang.spares))}
    reported, n = -1, len(members)
    until = look = time.monotonic() + start_within
    queued = None
    while True:
        gang.pause(TICK)
        if why := handle.waits():
            until = time.monotonic() + start_within
            if why != queued:
                queued = why
                gang.say(f"waits for hosts: {why}")
        lookout.check()
        nodes = dict(lookout.nodes)
        waiting = [k for k, node in nodes.items() if node.state == "waiting" and lookout.silence(k) < STALE]
        if len(waiting) == n:
            return None
        if len(waiting) != reported:
            reported = len(waiting)
            gang.say(f"attempt {lookout.board.attempt}: {reported} of {n} hosts have joined")
        over = [k for k, alive in handle.alive().items() if alive is False and k in members]
        over += [k for k, node in nodes.items() if k not in waiting]
        came = None
        if over:
            line = f"host: member {over[0]} ended before the gang was complete; its log says why"
        elif time.monotonic() > until:
            line = f"host: {len(waiting)} of {n} hosts joined within {start_within:.0f} s"
            came = None if kept else len(waiting)
        elif why and time.monotonic() > look:  # a queue also waits for hosts that are down
            look = until
            smaller = gang.smaller(without)
            if smaller is None or smaller[0].layout.nodes >= n:
                continue
            came = smaller[1]
            line = f"host: {came} of {n} hosts are available after {run.gang.start_within:.0f} s; {why}"
        else:
            continue
        failure = Failure("host", "; ".join(dict.fromkeys((line, *handle.words()[-1:]))), True)
        return Outcome(failure, came)


def go(gang: Gang, run: Run, lookout: Lookout, kept: Kept | None) -> dict[int, str]:
    """Start all members. Returns their hosts by member, in the order of their ranks; the first is the master.

    Spare hosts stay. They are the last by place, and hosts that had ranks before have them again.
    """
    nodes, probe = dict(lookout.nodes), (gang.folder / "probe").read_text()
    if apart := tuple(k for k, node in nodes.items() if node.probe != probe):
        _check_sharing(gang, nodes[apart[0]])
        lookout.say(apart=apart, runs=str(runs_folder()), copied=gang.newest())
    names = host_names(lookout)
    members = {name: k for k, name in names.items()}
    order = [members[name] for name in rank_order({name: nodes[k].place for k, name in names.items()})]
    had = kept.order if kept else ()
    chosen = sorted(order, key=lambda k: k not in had)[: run.layout.nodes]
    order = [k for k in order if k in chosen]
    first = nodes[order[0]]
    lookout.peers = Peers({str(k): (node.address, node.port) for k, node in nodes.items()})
    lookout.say(state="go", order=tuple(order), master=(first.address, first.master_port), key=secrets.token_hex(32))
    if apart:
        gang.say(f"{len(apart)} of {len(nodes)} hosts do not share {gang.folder}: the store has copies of their files")
        followed = [gang.folder / "files" / name for name in gang.job.followed]
        Collector(gang.copies, lookout, run, followed, gang.say)
    return {k: names[k] for k in order}


def _check_sharing(gang: Gang, node: Member) -> None:
    """Raise a Fault if the job needs a folder that all hosts share."""
    if key := gang.job.sharing():
        raise Fault(
            f"{key}: {gang.folder} is not the same storage on {node.host} ({node.address}), and has to be; "
            "name a folder of a file system that all hosts share in FINETUNE_RUNS"
        )
