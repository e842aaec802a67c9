"""Board of a gang's attempt, in the store: controller and members write messages there, without a port to open.

    gangs/<gang>/<attempt>/gang.json       the controller's word: gathering, go or stop; renewed, or it is worth nothing
                          /task.json       the command that all ranks run
                          /resolved.yaml   the configuration that they get
                          /peers.json      where each member's witness answers; apart, as the word is read each second
                          /nodes/<k>.json  what member k is and does: its state, its ranks, what it died of
                          /beats/<k>       renewed while member k lives
                          /logs/<k>/...    output of its ranks, in pieces as they came

tasks/gang/messages.py has what stands in each.

A board object has one writer. The process that creates it owns it: a second member of the same number is refused. No
clock is compared with another host's. A process counts as alive while its objects are seen to change. Renewals are
apart from messages, so that one listing tells the controller who lives, and it reads only what is new.

Calls to the store are made by the caller's own thread, and may take as long as the store does.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tasks.gang import messages
from tasks.gang.messages import Member, Task, Word
from tasks.store import Store

RENEWED = 3.0  # seconds between renewals, of the controller and of each member
POLLED = 1.0  # seconds between looks at what others wrote
PEERS = "peers.json"
STALE = 15.0  # seconds without a renewal by the controller after which its word is worth nothing


@dataclass(frozen=True)
class Board:
    store: Store
    gang: str
    attempt: int

    @property
    def place(self) -> str:
        return f"gangs/{self.gang}/{self.attempt}"

    def read(self, name: str) -> dict[str, Any] | None:
        """Object of the board as it stands there: an attempt of the past may be another version's."""
        found = self.store.read(f"{self.place}/{name}")
        return json.loads(found[0]) if found else None

    def task(self) -> Task:
        name = f"{self.place}/task.json"
        return Task.from_json(self.text("task.json").encode(), name)

    def member(self, node: int) -> Member | None:
        name = f"{self.place}/nodes/{node}.json"
        found = self.store.read(name)
        return Member.from_json(found[0], name) if found else None

    def pulse(self, last: tuple[Word, str] | None = None) -> tuple[Word, str] | None:
        """The controller's word and its tag, which changes with every renewal.

        The result is `last` as long as it has not changed.
        """
        name = f"{self.place}/gang.json"
        found = self.store.read(name)
        if found and last and found[1] == last[1]:
            return last  # that of 1000 hosts takes a millisecond to decode
        return (Word.from_json(found[0], name), found[1]) if found else None

    def tags(self) -> dict[str, str]:
        """Tags of notices and renewals. Pieces of logs are not listed: their number grows for as long as a run does."""
        found = ((kind, self.store.keys(f"{self.place}/{kind}")) for kind in ("nodes", "beats"))
        return {f"{kind}/{name}": tag for kind, keys in found for name, (_, tag) in keys.items()}

    def text(self, name: str) -> str:
        found = self.store.read(f"{self.place}/{name}")
        return found[0].decode(errors="replace") if found else ""

    def write(self, name: str, data: bytes) -> None:
        self.store.write(f"{self.place}/{name}", data)


class Notice:
    """A message on the board that this process alone writes. It is lost where another process has written it."""

    def __init__(self, board: Board, name: str):
        self.board, self.key, self.tag = board, f"{board.place}/{name}", ""

    def create(self, message: Word | Member) -> bool:
        self.tag = self.board.store.create(self.key, message.to_json()) or ""
        return bool(self.tag)

    def write(self, message: Word | Member) -> bool:
        """Write the message. Returns whether the object is still this process's."""
        data = message.to_json()
        tag = self.board.store.replace(self.key, data, self.tag)
        if tag is None:  # an answer that got lost has changed the tag all the same
            found = self.board.store.read(self.key)
            if found is None or messages.by(found[0]) != message.by:
                return False
            tag = self.board.store.replace(self.key, data, found[1])
        self.tag = tag or self.tag
        return tag is not None


@dataclass
class Watch:
    """Renewals that were seen, with the time by this process's clock.

    Time in which the store was away does not count.
    """

    seen: dict[str, str] = field(default_factory=dict)
    at: dict[str, float] = field(default_factory=dict)

    def look(self, tags: dict[str, str]) -> set[str]:
        """The names whose tag has changed since the last look."""
        now = time.monotonic()
        changed = {name for name, tag in tags.items() if self.seen.get(name) != tag}
        self.at |= dict.fromkeys(changed, now)
        self.seen = dict(tags)
        return changed

    def forgive(self) -> None:
        """Give every process its full time again, as the store was away."""
        self.at = dict.fromkeys(self.at, time.monotonic())

    def age(self, name: str) -> float:
        return time.monotonic() - self.at.get(name, time.monotonic())


def newest_attempt(store: Store, gang: str) -> int:
    """Number of the newest attempt; 0 where there was none."""
    return last(lambda number: store.read(f"gangs/{gang}/{number}/gang.json") is not None)


def last(there: Callable[[int], bool]) -> int:
    """Largest n for which there(n), where the numbers from 1 on have no gaps.

    The search doubles and then halves, because listing months of logs takes long.
    """
    below, above = 0, 1
    while there(above):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (above + below) // 2
        below, above = (middle, above) if there(middle) else (below, middle)
    return below
