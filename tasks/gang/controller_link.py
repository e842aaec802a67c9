"""Controller's side of the board: a thread that renews its word, sees who renews, and reads what is new.

Two listings a second say who lives. Only notices that changed are read, and the output of rank 0. The thread may hang
for as long as the store does: no member is blamed for that time.
"""

import collections
import secrets
import threading
import time
from dataclasses import replace
from typing import Any

from contract.faults import Fault
from tasks.gang import peer_probe
from tasks.gang.board import PEERS, POLLED, RENEWED, Board, Notice, Watch
from tasks.gang.messages import Foreign, Member, Peers, Standing, Word

AWAY = 6.0  # seconds without an answer: the store was away, not the members


class Lookout:
    def __init__(self, board: Board, probe: str):
        self.board = board
        self.nodes: dict[int, Member] = {}
        self.lines: collections.deque[str] = collections.deque(maxlen=10_000)
        self.answered = time.monotonic()
        self.lost = False  # somebody else controls this attempt
        self.foreign = ""  # what a member of another version is refused with
        self.peers = Peers({})  # on the board before the word that says go
        self._first_failed: list[int] = []
        self._watch, self._turn = Watch(), threading.Lock()
        self._wake, self._over = threading.Event(), threading.Event()
        self._unsaid, self._told_peers, self._pending, self._pieces = False, False, b"", 0
        self._notice = Notice(board, "gang.json")
        self.word = Word(
            by=secrets.token_hex(8),
            state="gathering",
            probe=probe,
            addresses=tuple(peer_probe.addresses()),
            port=peer_probe.serve(self._answer),
        )
        self._thread = threading.Thread(target=self._look, daemon=True, name="lookout")

    def begin(self) -> bool:
        """Create the attempt on the board. Returns False where another controller has it already."""
        if not self._notice.create(self.word):
            return False
        self._thread.start()
        return True

    def say(self, **news: Any) -> None:
        with self._turn:
            self.word = replace(self.word, **news)
            self._unsaid = True
        self._wake.set()

    def end(self, within: float) -> None:
        self.say(closed=True)
        self._over.set()
        self._wake.set()
        self._thread.join(within)

    def silence(self, node: int) -> float:
        """Seconds without a renewal by this member, while the store answered."""
        if time.monotonic() - self.answered > AWAY:
            return 0.0
        with self._turn:
            beat = f"beats/{node}"  # what has joined and never renewed is judged by when it joined
            return self._watch.age(beat if beat in self._watch.at else f"nodes/{node}.json")

    def order_of_failure(self, node: int) -> int:
        return self._first_failed.index(node) if node in self._first_failed else len(self._first_failed)

    def _answer(self) -> Standing:
        return Standing(self.board.gang, self.board.attempt, self.word.state)

    def _look(self) -> None:
        renewed = time.monotonic()
        while True:
            over = self._over.is_set()
            self._wake.clear()
            try:
                if self._unsaid or over or time.monotonic() - renewed > RENEWED:
                    self._renew()
                    renewed = time.monotonic()
                self._read()
                if over:
                    return
            except Exception:
                if over:
                    return
            self._wake.wait(POLLED)

    def _renew(self) -> None:
        with self._turn:
            self._unsaid = False
            self.word = word = replace(self.word, beat=self.word.beat + 1)
        try:
            if word.state == "go" and not self._told_peers:
                self.board.write(PEERS, self.peers.to_json())
                self._told_peers = True
            self.lost = self.lost or not self._notice.write(word)
        except Exception:
            self._unsaid = True
            raise

    def _read(self) -> None:
        tags = self.board.tags()
        now = time.monotonic()
        with self._turn:
            changed = self._watch.look(tags)
            if now - self.answered > AWAY:
                self._watch.forgive()
        self.answered = now
        for name in sorted(changed):
            kind, _, rest = name.partition("/")
            if kind == "nodes":
                self._read_member(int(rest.partition(".")[0]))
        self._read_log()

    def _read_member(self, node: int) -> None:
        try:
            told = self.board.member(node)
        except Foreign as fault:
            self.foreign = str(fault)
            return
        if told is None:
            return
        if told.state == "failed" and node not in self._first_failed:
            self._first_failed.append(node)
        self.nodes[node] = told

    def check(self) -> None:
        """Raise a Fault where a member is another version's."""
        if self.foreign:
            raise Fault(self.foreign)

    def _read_log(self) -> None:
        """Read the new output of rank 0, which is on the first member in order."""
        log = f"{self.board.place}/logs/{(*self.word.order, 0)[0]}/rank00000.out"
        while found := self.board.store.read(f"{log}.{self._pieces:05d}"):
            self._pieces += 1
            *whole, self._pending = (self._pending + found[0]).split(b"\n")
            self.lines.extend(line.decode(errors="replace") for line in whole)
