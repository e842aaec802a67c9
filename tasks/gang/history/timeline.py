"""History of a gang's attempts, for people: the controller reports it, and the store keeps it beside the boards.

    gangs/history/<gang>.json      one object per gang, so that one listing finds all gangs however long their logs are

Times are of the clock of the host that runs the flow, and no decision depends on them. A step is the last that rank 0
wrote down. A step that is made twice counts for both attempts.
"""

# pyright: reportArgumentType=false

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.gang.messages import Member
from tasks.run.progress import newest
from tasks.store import Store

FOLDER = "gangs/history"
KEPT = 200  # attempts, the newest
DONE = "done"


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
    hosts: tuple[Host, ...] = ()  # in the order of their ranks; none before all have come
    start: int = 0  # step of the checkpoint that it went on from
    reached: int = 0
    ended: float | None = None
    how: str = ""  # the line that it ended with
    next: str = ""  # what followed


@dataclass(frozen=True)
class History:
    gang: str
    run: str  # the configuration's name
    flow: str  # the flow run's
    attempts: tuple[Attempt, ...] = ()
    end: str = ""  # why there is no next attempt; DONE, or what was wrong

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts of the last attempt that trained."""
        return next((attempt.hosts for attempt in reversed(self.attempts) if attempt.hosts), ())

    @property
    def failure(self) -> str:
        """The line of the last failure; empty where no attempt has failed."""
        return next((one.how for one in reversed(self.attempts) if one.how not in ("", DONE)), "")

    def behind(self, earlier: "History | None") -> "History":
        """The history with the attempts of an earlier flow run in front."""
        first = self.attempts[0].number if self.attempts else 0
        before = [attempt for attempt in earlier.attempts if attempt.number < first] if earlier else []
        return replace(self, attempts=(*before, *self.attempts)[-KEPT:])


@dataclass
class Teller:
    """Recorder that the controller calls. Each change is given to `tell`, which returns at once."""

    history: History
    metrics: Path  # what rank 0 appends a line to at each step
    tell: Callable[[History], None] = lambda _: None
    _before: Any = field(default=None, init=False)

    def begins(self, number: int) -> None:
        self._add(Attempt(number, time.time()))

    def trains(self, names: dict[int, str], nodes: dict[int, Member], each: int, start: int) -> None:
        """Note that an attempt trains.

        `names` are of hosts by member, in the order of their ranks; `nodes` are the members' messages; `each` is the
        number of ranks of a host.
        """
        hosts = tuple(Host(names[k], nodes[k].address, k, place * each, each) for place, k in enumerate(names))
        self._before = _stamp(self.metrics)
        self._change(hosts=hosts, start=start, reached=start)

    def ends(self, how: str) -> None:
        last = self.history.attempts[-1]
        moved = last.hosts and _stamp(self.metrics) != self._before
        reached = int(newest(self.metrics, "step")[0]) if moved else last.start
        self._change(ended=time.time(), how=how, reached=max(reached, last.start))

    def follows(self, line: str) -> None:
        how = self.history.attempts[-1].how
        self._change(next=line.removeprefix(how).removeprefix("; ") or "the end")

    @contextmanager
    def over(self) -> Iterator[None]:
        """Note the end of the gang when the block around all attempts ends."""
        try:
            yield
        except BaseException as error:
            self._set(end=str(error) or type(error).__name__)
            raise
        self._set(end=DONE)

    def _add(self, attempt: Attempt) -> None:
        self._set(attempts=(*self.history.attempts, attempt)[-KEPT:])

    def _change(self, **news: Any) -> None:
        *others, last = self.history.attempts
        self._set(attempts=(*others, replace(last, **news)))

    def _set(self, **news: Any) -> None:
        self.history = replace(self.history, **news)
        self.tell(self.history)


def read(store: Store, gang: str) -> History | None:
    """The history of a gang; None where there is none that can be read."""
    found = store.read(f"{FOLDER}/{gang}.json")
    try:
        told = json.loads(found[0]) if found else {}
        attempts = [one | {"hosts": tuple(Host(**host) for host in one["hosts"])} for one in told["attempts"]]
        return History(**told | {"attempts": tuple(Attempt(**one) for one in attempts)})
    except (ValueError, TypeError, KeyError):
        return None


def write(store: Store, history: History) -> None:
    store.write(f"{FOLDER}/{history.gang}.json", json.dumps(asdict(history)).encode())


def every(store: Store) -> list[History]:
    """Histories of all gangs. The one that began last comes first."""
    names = (name.removesuffix(".json") for name in store.keys(FOLDER))
    found = [history for name in names if (history := read(store, name)) and history.attempts]
    return sorted(found, key=lambda history: history.attempts[-1].began, reverse=True)


def state(told: History) -> str:
    """State of a gang in one line, as far as the controller has reported it."""
    if told.end:
        return DONE if told.end == DONE else f"ended: {told.end}"
    last = told.attempts[-1]
    if last.ended:
        return f"attempt {last.number} has ended; {last.next or 'what follows is being decided'}"
    if not last.hosts:
        return f"attempt {last.number} waits for its hosts"
    does = "evaluates" if told.gang.startswith("evaluate-") else "trains"
    return f"attempt {last.number} {does} on {len(last.hosts)} host{'s' * (len(last.hosts) > 1)}"


def settled(told: History) -> list[Attempt]:
    """All attempts. One without an end that others follow gets one: its controller died."""
    pairs = zip(told.attempts, (*told.attempts[1:], None), strict=True)
    lost = {"how": "its flow ended without a word", "next": "another flow went on"}
    return [replace(one, ended=later.began, **lost) if later and one.ended is None else one for one, later in pairs]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns
