"""Board of a gang's attempt, in the store: controller and members exchange messages without an open port.

    gangs/<gang>/<attempt>/gang.json       the controller's word: gathering, go or stop; it expires unless renewed
                          /task.json       the command that all ranks run
                          /resolved.yaml   the configuration of the ranks
                          /peers.json      address of each member's witness; a separate file, as gang.json is read often
                          /nodes/<k>.json  member k: its state, its ranks, and why it failed
                          /beats/<k>       heartbeat of member k
                          /logs/<k>/...    output of its ranks, in numbered pieces

The fields of each message are in tasks/gang/messages.py.

A board object has one writer, the process that created it: a second member with the same number is refused. Clocks of
different hosts are never compared. A process counts as alive while a reader sees its objects change. Heartbeats are
separate from messages: one listing shows the controller who is alive, and it reads only objects that changed.

Calls to the store run in the caller's thread, and may block as long as the store does.
"""

import json
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.gang import messages
from tasks.gang.messages import Member, Message, Word
from tasks.store import Store

RENEWED = 3.0  # seconds between renewals, of the controller and of each member
POLLED = 1.0  # seconds between reads of other processes' objects
PEERS = "peers.json"
STALE = 15.0  # seconds without a renewal after which the controller's word has expired


@dataclass(frozen=True)
class Board:
    store: Store
    gang: str
    attempt: int

    @property
    def place(self) -> str:
        return f"gangs/{self.gang}/{self.attempt}"

    def read(self, name: str) -> dict[str, Any] | None:
        """Raw content of an object, for attempts that another version of the project may have written."""
        entry = self.store.read(f"{self.place}/{name}")
        return json.loads(entry[0]) if entry else None

    def message[M: Message](self, kind: type[M], name: str) -> M | None:
        place = f"{self.place}/{name}"
        entry = self.store.read(place)
        return kind.from_json(entry[0], place) if entry else None

    def pulse(self, last: tuple[Word, str] | None = None) -> tuple[Word, str] | None:
        """Return the controller's word and its tag, which changes with every renewal; `last` if the tag is the same."""
        name = f"{self.place}/gang.json"
        entry = self.store.read(name)
        if entry and last and entry[1] == last[1]:
            return last  # decoding the word of a gang of 1000 hosts takes a millisecond
        return (Word.from_json(entry[0], name), entry[1]) if entry else None

    def tags(self) -> dict[str, str]:
        """Tags of messages and heartbeats. Pieces of logs are not listed, as their number grows with the run."""
        listings = ((kind, self.store.keys(f"{self.place}/{kind}")) for kind in ("nodes", "beats"))
        return {f"{kind}/{name}": tag for kind, keys in listings for name, (_, tag) in keys.items()}

    def text(self, name: str) -> str:
        entry = self.store.read(f"{self.place}/{name}")
        return entry[0].decode(errors="replace") if entry else ""

    def write(self, name: str, data: bytes) -> None:
        self.store.write(f"{self.place}/{name}", data)


class Correspondent[M: (Word, Member)]:
    """A process of a gang: its message on the board, and a thread that writes each change of the message.

    This process is the only writer of the message. The thread may block for as long as the store does. After the end it
    continues until the store has not answered for `patience` seconds.
    """

    def __init__(self, board: Board, name: str, message: M, patience: float):
        self.board, self.message, self._key, self._tag = board, message, f"{board.place}/{name}", ""
        self.answered = time.monotonic()  # when the store answered last
        self.lost = False  # another process has written the message
        self._patience = patience
        self._turn, self._wake, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._unsaid, self._renewed = False, 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)

    def create(self) -> bool:
        """Put the message on the board. Returns False if another process has done that."""
        self._tag = self.board.store.create(self._key, self.message.to_json()) or ""
        return bool(self._tag)

    def say(self, **news: Any) -> None:
        """Change fields of the message. Others read them as soon as the store accepts them."""
        with self._turn:
            self.message = replace(self.message, **news)
            self._unsaid = True
        self._wake.set()

    def end(self, within: float) -> None:
        """Write the remaining changes, if the store accepts them in time."""
        self._over.set()
        self._wake.set()
        self._thread.join(within)

    @abstractmethod
    def _changes(self) -> bool:
        """Whether other processes write something new within seconds."""

    @abstractmethod
    def _work(self, over: bool) -> None:
        """Write and read the due messages; at the end, all remaining messages."""

    def _run(self) -> None:
        while True:
            over = self._over.is_set()
            self._wake.clear()
            try:
                self._work(over)
                if over:
                    return
            except Exception:  # the store does not answer; self.answered keeps the time of its last answer
                if over and time.monotonic() - self.answered > self._patience:
                    return
            self._wake.wait(POLLED / 5 if self._changes() else POLLED)

    def _is_due(self) -> bool:
        """Whether a renewal is due, which others see as a sign of life."""
        due = time.monotonic() - self._renewed > RENEWED
        self._renewed = time.monotonic() if due else self._renewed
        return due

    def _send(self, **news: Any) -> None:
        with self._turn:
            self._unsaid = False
            self.message = message = replace(self.message, **news)
        try:
            self.lost = self.lost or not self._write(message)
        except Exception:
            self._unsaid = True
            raise

    def _write(self, message: M) -> bool:
        """Write the message. Returns False if another process has written the object."""
        data = message.to_json()
        tag = self.board.store.replace(self._key, data, self._tag)
        if tag is None:  # perhaps an earlier write of this process succeeded and only its answer was lost
            entry = self.board.store.read(self._key)
            if entry is None or messages.by(entry[0]) != message.by:
                return False
            tag = self.board.store.replace(self._key, data, entry[1])
        self._tag = tag or self._tag
        return tag is not None


@dataclass
class Watch:
    """Renewals that this process has seen, with the time by its clock, which excludes outages of the store."""

    seen: dict[str, str] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)

    def look(self, tags: dict[str, str]) -> set[str]:
        """Return the names whose tag has changed since the last call."""
        now = time.monotonic()
        changed = {name for name, tag in tags.items() if self.seen.get(name) != tag}
        self.at |= dict.fromkeys(changed, now)
        self.seen = dict(tags)
        return changed

    def forgive(self) -> None:
        """Restart the time of every process, after the store did not answer."""
        self.at = dict.fromkeys(self.at, time.monotonic())

    def age(self, name: str) -> float:
        return time.monotonic() - self.at.get(name, time.monotonic())


def newest_attempt(store: Store, gang: str) -> int:
    """Return the number of the newest attempt; 0 if there is none."""
    return last(lambda number: store.read(f"gangs/{gang}/{number}/gang.json") is not None)


def last(exists: Callable[[int], bool]) -> int:
    """Return the largest n for which exists(n) is true, if there are no gaps from 1 on; 0 if exists(1) is false.

    The search doubles and then halves, because listing months of logs takes long.
    """
    below, above = 0, 1
    while exists(above):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if exists(middle) else (below, middle)
    return below
