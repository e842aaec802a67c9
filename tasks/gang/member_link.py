"""Member's side of the board: a thread that reads the controller's word, renews this member's, and ships logs.

The thread may block for as long as the store does. Its results are plain attributes, with times by this host's clock.
If the store does not answer, a second thread asks the witnesses (tasks/gang/peer_probe.py).
"""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.gang import peer_probe
from tasks.gang.board import PEERS, POLLED, RENEWED, STALE, Board, Notice
from tasks.gang.messages import Address, Foreign, Member, Peers, Word

SHIPPED = 3.0  # seconds between pieces of a log
PIECE = 1 << 20  # bytes at most
WITNESSES = 3
WITNESS_AFTER = 4.0  # seconds without an answer of the store


class Link:
    def __init__(self, board: Board, node: int, me: Member):
        self.board, self.node, self.me = board, node, me
        self.word = Word("", "gathering")  # until the board has been read
        self.peers = Peers({})  # filled after the controller's go
        self.fresh = self.answered = self.witnessed = time.monotonic()
        self.met = False  # the controller was reached from here
        self.superseded = ""  # why the attempt no longer needs this member, empty if it does
        self.stolen = False  # another process writes as this member
        self.logs: dict[str, Path] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # pieces and bytes of each log
        self._notice = Notice(board, f"nodes/{node}.json")
        self._turn, self._wake, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._unsaid = False
        self._threads: list[threading.Thread] = []

    def join(self) -> bool:
        """Join the attempt. Returns False if another process is this member, or the attempt does not gather members."""
        pulse = self.board.pulse()
        if pulse is None or pulse[0].state != "gathering" or not self._notice.create(self.me):
            return False
        self.word, self._tag = pulse
        for work, name in ((self._renew, "board"), (self._ask, "witnesses")):
            self._threads.append(threading.Thread(target=work, daemon=True, name=name))
            self._threads[-1].start()
        return True

    def say(self, **news: Any) -> None:
        """Report changed fields to the controller as soon as the store accepts them."""
        with self._turn:
            self.me = replace(self.me, **news)
            self._unsaid = True
        self._wake.set()

    def end(self, within: float) -> None:
        """Write and ship the rest, if the store accepts it in time."""
        self._over.set()
        self._wake.set()
        self._threads[0].join(within)

    def why_stop(self) -> str:
        """The reason why this member has to end; empty while it may continue."""
        if self.word.state == "stop":
            return f"stop: {self.word.reason}"
        if self.stolen:
            return "another process is this member"
        if self.superseded:
            return self.superseded
        now = time.monotonic()
        if now - self.answered <= STALE:
            return "the controller is gone" if self.answered - self.fresh > STALE else ""
        if now - self.witnessed > STALE:
            return "cut off: neither the store nor a witness answers"
        return ""

    def _renew(self) -> None:
        beat, renewed, shipped = 0, 0.0, time.monotonic()
        while True:
            over = self._over.is_set()
            self._wake.clear()
            try:
                self._read()
                if self._unsaid or over:
                    self._write()
                if time.monotonic() - renewed > RENEWED:
                    beat, renewed = beat + 1, time.monotonic()
                    self.board.write(f"beats/{self.node}", str(beat).encode())
                if over or time.monotonic() - shipped > SHIPPED:
                    shipped = time.monotonic()
                    self._ship()
                if over:
                    return
            except Exception:  # the store does not answer; self.answered keeps the time of its last answer
                if over and time.monotonic() - self.answered > STALE:
                    return
            self._wake.wait(POLLED)

    def _read(self) -> None:
        try:
            pulse = self.board.pulse((self.word, self._tag))
        except Foreign as fault:  # the controller runs another version
            self.superseded = str(fault)
            return
        now = time.monotonic()
        away = now - self.answered > RENEWED + STALE / 3
        self.answered = now
        if pulse is None:
            self.superseded = "the attempt is no longer on the board"
            return
        if pulse[1] != self._tag or away:  # an outage restarts the controller's time
            self.fresh = now
        self.word, self._tag = pulse
        if self.word.state == "go" and not self.peers.at and (peers := self.board.text(PEERS)):
            self.peers = Peers.from_json(peers.encode(), f"{self.board.place}/{PEERS}")

    def _write(self) -> None:
        with self._turn:
            self._unsaid = False
            me = self.me
        try:
            self.stolen = self.stolen or not self._notice.write(me)
        except Exception:
            self._unsaid = True
            raise

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
