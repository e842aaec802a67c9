"""Controller's side of the board: a thread that renews its word, sees which members renew, and reads changes.

Two listings a second show which members are alive. Only messages that changed are read, and the output of rank 0, which
is passed on. The thread may hang for as long as the store does: no member is blamed for that time.
"""

import math
import secrets
import time
from collections.abc import Callable

from contract.faults import Fault
from tasks.gang import peer_probe
from tasks.gang.board import PEERS, Board, Correspondent, Watch
from tasks.gang.history.logs import Log
from tasks.gang.messages import Foreign, Member, Peers, Standing, Word

AWAY = 6.0  # seconds without an answer: the store was away, not the members


class Lookout(Correspondent[Word]):
    def __init__(self, board: Board, probe: str, say: Callable[[str], None], quick: bool = False):
        word = Word(secrets.token_hex(8), "gathering", probe=probe, addresses=tuple(peer_probe.addresses()))
        super().__init__(board, "gang.json", word, patience=0.0)
        self.say(port=peer_probe.serve(self._answer))
        self.quick = quick  # the hosts of the last attempt continue
        self.nodes: dict[int, Member] = {}
        self.foreign = ""  # the reason why a member of another version is refused
        self.peers = Peers({})  # on the board before the word with state go
        self.was_read = -math.inf  # when the last complete reading of the members began
        self._first_failed: list[int] = []
        self._watch, self._log, self._told_peers, self._pass_on = Watch(), Log(board, "", ""), False, say

    @property
    def word(self) -> Word:
        return self.message

    def begin(self) -> bool:
        """Create the attempt on the board. Returns False if another controller has it already."""
        if not self.create():
            return False
        self._thread.start()
        return True

    def end(self, within: float) -> None:
        self.say(closed=True)
        super().end(within)

    def silence(self, node: int) -> float:
        """Seconds without a renewal by this member, while the store answered."""
        if time.monotonic() - self.answered > AWAY:
            return 0.0
        with self._turn:
            beat = f"beats/{node}"  # a member without a renewal is judged by the time when it joined
            return self._watch.age(beat if beat in self._watch.at else f"nodes/{node}.json")

    def order_of_failure(self, node: int) -> int:
        return self._first_failed.index(node) if node in self._first_failed else len(self._first_failed)

    def _changes(self) -> bool:
        return self.word.state == "stop" or (self.quick and self.word.state == "gathering")

    def _answer(self) -> Standing:
        """Answer a member, and read the board at once: the member may have failed."""
        self._wake.set()
        return Standing(self.board.gang, self.board.attempt, self.word.state)

    def _work(self, over: bool) -> None:
        if self._is_due() or self._unsaid or over:
            self._send(beat=self.word.beat + 1)
        self._read()

    def _write(self, message: Word) -> bool:
        if message.state == "go" and not self._told_peers:
            self.board.write(PEERS, self.peers.to_json())
            self._told_peers = True
        return super()._write(message)

    def _read(self) -> None:
        began, tags = time.monotonic(), self.board.tags()
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
        self.was_read = began
        # The output of rank 0, which is on the first member in order.
        self._log.name = f"{(*self.word.order, 0)[0]}/rank00000.out"
        for line in self._log.lines():
            self._pass_on(line)

    def _read_member(self, node: int) -> None:
        try:
            member = self.board.message(Member, f"nodes/{node}.json")
        except Foreign as fault:
            self.foreign = str(fault)
            return
        if member is None:
            return
        if member.state == "failed" and node not in self._first_failed:
            self._first_failed.append(node)
        self.nodes[node] = member

    def check(self) -> None:
        """Raise a Fault if a member is of another version."""
        if self.foreign:
            raise Fault(self.foreign)
