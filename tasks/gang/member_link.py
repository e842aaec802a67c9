"""Member's side of the board: a thread that reads the controller's word, renews this member's, and ships logs.

The thread may block for as long as the store does. Its results are plain attributes, with times by this host's clock.
If the store does not answer, a second thread asks the witnesses (tasks/gang/peer_probe.py).
"""

import threading
import time
from pathlib import Path

from tasks.gang import peer_probe
from tasks.gang.board import PEERS, POLLED, RENEWED, STALE, Board, Correspondent
from tasks.gang.messages import Address, Foreign, Member, Peers, Word

SHIPPED = 3.0  # seconds between pieces of a log
PIECE = 1 << 20  # bytes at most
WITNESSES = 3
WITNESS_AFTER = 4.0  # seconds without an answer of the store


class Link(Correspondent[Member]):
    def __init__(self, board: Board, node: int, message: Member):
        super().__init__(board, f"nodes/{node}.json", message, patience=STALE)
        self.node = node
        self.word = Word("", "gathering")  # until the board has been read
        self.peers = Peers({})  # filled after the controller's go
        self.fresh = self.witnessed = self.answered
        self.stayed = False  # this host took part in the last attempt and continues
        self.met = False  # the controller was reached from here
        self.superseded = ""  # why the attempt no longer needs this member, empty if it does
        self.logs: dict[str, Path] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # pieces and bytes of each log
        self._beat, self._shipped = 0, time.monotonic()

    def join(self) -> bool:
        """Join the attempt. Returns False if another process is this member, or the attempt is over."""
        pulse = self.board.pulse()
        if pulse is None or pulse[0].state == "stop" or not self.create():
            return False
        self.word, self._word_tag = pulse
        self._thread.start()
        threading.Thread(target=self._ask, daemon=True, name="witnesses").start()
        return True

    def why_stop(self) -> str:
        """The reason why this member has to end; empty while it may continue."""
        return f"stop: {self.word.reason}" if self.word.state == "stop" else self.why_leave()

    def why_leave(self) -> str:
        """The reason why this member has to end even if the controller wants it to stay."""
        if self.lost:
            return "another process is this member"
        if self.superseded:
            return self.superseded
        now = time.monotonic()
        if now - self.answered <= STALE:
            return "the controller is gone" if self.answered - self.fresh > STALE else ""
        if now - self.witnessed > STALE:
            return "cut off: neither the store nor a witness answers"
        return ""

    def _changes(self) -> bool:
        return self.word.state == "stop" or (self.stayed and self.word.state == "gathering")

    def _work(self, over: bool) -> None:
        self._read()
        if self._unsaid or over:
            self._send()
            if self.met and self.message.state == "failed" and self.word.state == "go":
                peer_probe.reached(self.word.addresses, self.word.port)  # the controller then reads the board at once
        if self._is_due():
            self._beat += 1
            self.board.write(f"beats/{self.node}", str(self._beat).encode())
        if over or time.monotonic() - self._shipped > SHIPPED:
            self._shipped = time.monotonic()
            self._ship()

    def _read(self) -> None:
        try:
            pulse = self.board.pulse((self.word, self._word_tag))
        except Foreign as fault:  # the controller runs another version
            self.superseded = str(fault)
            return
        now = time.monotonic()
        away = now - self.answered > RENEWED + STALE / 3
        self.answered = now
        if pulse is None:
            self.superseded = "the attempt is no longer on the board"
            return
        if pulse[1] != self._word_tag or away:  # an outage restarts the controller's time
            self.fresh = now
        self.word, self._word_tag = pulse
        if self.word.state == "go" and not self.peers.at:
            self.peers = self.board.message(Peers, PEERS) or self.peers

    def _ship(self) -> None:
        for name, path in self.logs.items():
            piece, at = self._sent.get(name, (0, 0))
            if not path.exists() or path.stat().st_size <= at:
                continue
            with path.open("rb") as file:
                file.seek(at)
                block = file.read(PIECE)
            self.board.write(f"logs/{self.node}/{name}.{piece:05d}", block)
            self._sent[name] = (piece + 1, at + len(block))

    def _ask(self) -> None:
        while not self._over.wait(POLLED):
            if time.monotonic() - self.answered < WITNESS_AFTER:
                self.witnessed = time.monotonic()
                continue
            for address, port in self._witnesses():
                standing = peer_probe.ask(address, port)
                if standing is None or standing.gang != self.board.gang:
                    continue
                if standing.attempt != self.board.attempt or standing.state == "stop":
                    self.superseded = f"{address} is at attempt {standing.attempt}, {standing.state}"
                self.witnessed = time.monotonic()
                break

    def _witnesses(self) -> list[Address]:
        """Addresses to ask: only the controller's if it was reached before, as only it knows of a later attempt."""
        if self.met:
            return [(address, self.word.port) for address in self.word.addresses]
        others = [peer for k, peer in self.peers.at.items() if k != str(self.node)]
        first = self.node % max(1, len(others))
        return (others[first:] + others[:first])[:WITNESSES]
