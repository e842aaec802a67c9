"""History of a job's attempts, for people: the controller of a gang or the flow's host reports it.

    gangs/history/<gang>.json      one object per gang: one listing shows all gangs, however long their logs are
    <work>/attempts.json           attempts of a job on one host or of a gang, in the folder of the flow's work

Times are of the clock of the host that runs the flow, and no decision depends on them. A step is the last that rank 0
recorded. A repeated step counts for both attempts.
"""

# pyright: reportArgumentType=false

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from contract.files import write_atomically
from tasks.gang.messages import Member
from tasks.run.progress import newest
from tasks.store import Store

FOLDER = "gangs/history"
KEPT = 200  # attempts, the newest
DONE = "done"
LIVE = 30.0  # seconds between reports of the time spent


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    member: int  # its number on the board
    first: int  # of its ranks
    ranks: int


@dataclass(frozen=True)
class Attempt:
    number: int
    began: float
    hosts: tuple[Host, ...] = ()  # in the order of their ranks; empty until all hosts have joined
    start: int = 0  # step of the checkpoint that it resumed from
    reached: int = 0
    ended: float | None = None
    how: str = ""  # DONE, or the line of its failure
    next: str = ""  # the action after it
    joined: float | None = None  # when it had all hosts, or its GPUs on the flow's host

    @property
    def gpus(self) -> int:
        return sum(host.ranks for host in self.hosts)


Spends = Callable[[Sequence[Attempt]], dict[str, float]]  # returns the seconds of attempts by category (spent.py)


@dataclass(frozen=True)
class History:
    gang: str
    run: str  # the configuration's name
    flow: str  # the flow run's
    attempts: tuple[Attempt, ...] = ()
    end: str = ""  # why no attempt follows: DONE, or the error
    seconds: dict[str, float] = field(default_factory=dict)  # of a training so far, by category (spent.py)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts of the last attempt that trained."""
        return next((attempt.hosts for attempt in reversed(self.attempts) if attempt.hosts), ())

    @property
    def failure(self) -> str:
        """The line of the last failure; empty if no attempt has failed."""
        return next((attempt.how for attempt in reversed(self.attempts) if attempt.how not in ("", DONE)), "")

    def after(self, earlier: "History | None") -> "History":
        """The history with the attempts of an earlier flow run in front."""
        first = self.attempts[0].number if self.attempts else 0
        before = [attempt for attempt in earlier.attempts if attempt.number < first] if earlier else []
        return replace(self, attempts=(*before, *self.attempts)[-KEPT:])


HISTORY, ATTEMPTS = TypeAdapter(History), TypeAdapter(tuple[Attempt, ...])
ATTEMPTS_FILE = "attempts.json"


@dataclass
class Teller:
    """Recorder that the controller calls. It passes each change to `tell`, which returns at once."""

    history: History
    metrics: Path  # rank 0 appends a line at each step
    tell: Callable[[History], None] = lambda _: None
    work: Path | None = None  # folder that keeps the attempts
    spends: Spends = lambda _: {}
    _before: Any = field(default=None, init=False)
    _set_at: float = field(default=0.0, init=False)
    _changing: Any = field(default_factory=threading.RLock, init=False)  # ticks come from another thread

    def tick(self) -> None:
        """Report the time spent so far, now and then."""
        if self.history.attempts and time.monotonic() - self._set_at > LIVE:
            self._set()

    def begins(self, number: int) -> None:
        self._set(attempts=(*self.history.attempts, Attempt(number, time.time()))[-KEPT:])

    def trains(self, names: dict[int, str], nodes: dict[int, Member], each: int, start: int) -> None:
        """Record that an attempt trains.

        `names` has the hosts by member, in the order of their ranks; `nodes` has the members' messages; `each` is the
        number of ranks per host.
        """
        self.joins(tuple(Host(names[k], nodes[k].address, k, at * each, each) for at, k in enumerate(names)), start)

    def joins(self, hosts: tuple[Host, ...], start: int = 0) -> None:
        self._before = _stamp(self.metrics)
        self._change(hosts=hosts, start=start, reached=start, joined=time.time())

    def ends(self, how: str) -> None:
        last = self.history.attempts[-1]
        moved = last.hosts and _stamp(self.metrics) != self._before
        reached = int(newest(self.metrics, "step")[0]) if moved else last.start
        self._change(ended=time.time(), how=how, reached=max(reached, last.start))

    def follows(self, line: str) -> None:
        if not self.history.attempts:  # no attempt could begin
            return
        how = self.history.attempts[-1].how
        self._change(next=line.removeprefix(how).removeprefix("; ") or "the end")

    @contextmanager
    def over(self) -> Iterator[None]:
        """Record the end of the gang when the block around all attempts ends."""
        try:
            yield
        except BaseException as error:
            self._set(end=str(error) or type(error).__name__)
            raise
        self._set(end=DONE)

    def _change(self, **changes: Any) -> None:
        with self._changing:
            *others, last = self.history.attempts
            self._set(attempts=(*others, replace(last, **changes)))

    def _set(self, **changes: Any) -> None:
        with self._changing:
            self._set_at = time.monotonic()
            self.history = replace(self.history, **changes)
            if self.work:
                numbers = {attempt.number for attempt in self.history.attempts}
                every = (*(one for one in attempts(self.work) if one.number not in numbers), *self.history.attempts)
                with suppress(OSError):
                    write_atomically(self.work / ATTEMPTS_FILE, ATTEMPTS.dump_json(every).decode(), durable=False)
                self.history = replace(self.history, seconds=self.spends(every))
            self.tell(self.history)


def attempts(folder: Path) -> tuple[Attempt, ...]:
    """Attempts at a job, from the folder of its work."""
    try:
        return ATTEMPTS.validate_json((folder / ATTEMPTS_FILE).read_bytes())
    except (OSError, ValidationError):
        return ()


def read(store: Store, gang: str) -> History | None:
    """The history of a gang; None if the store has none or it is unreadable."""
    entry = store.read(f"{FOLDER}/{gang}.json")
    try:
        return HISTORY.validate_json(entry[0]) if entry else None
    except ValidationError:
        return None


def write(store: Store, history: History) -> None:
    store.write(f"{FOLDER}/{history.gang}.json", HISTORY.dump_json(history))


def every(store: Store) -> list[History]:
    """Histories of all gangs, ordered by the start of their last attempt, newest first."""
    names = (name.removesuffix(".json") for name in store.keys(FOLDER))
    histories = [history for name in names if (history := read(store, name)) and history.attempts]
    return sorted(histories, key=lambda history: history.attempts[-1].began, reverse=True)


def state(history: History) -> str:
    """State of a gang in one line, as far as the controller has reported it."""
    if history.end:
        return DONE if history.end == DONE else f"ended: {history.end}"
    last = history.attempts[-1]
    if last.ended:
        return f"attempt {last.number} has ended; {last.next or 'the next action is being decided'}"
    if not last.hosts:
        return f"attempt {last.number} waits for its hosts"
    verb = "evaluates" if history.gang.startswith("evaluate-") else "trains"
    return f"attempt {last.number} {verb} on {len(last.hosts)} host{'s' * (len(last.hosts) > 1)}"


def settled(history: History) -> list[Attempt]:
    """All attempts. An earlier attempt without an end gets one, as its controller died."""
    pairs = zip(history.attempts, (*history.attempts[1:], None), strict=True)
    lost = {"how": "its flow ended without a report", "next": "another flow continued"}
    return [
        replace(attempt, ended=later.began, **lost) if later and attempt.ended is None else attempt
        for attempt, later in pairs
    ]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
