"""Controller's side of copies: which checkpoint members copy to the store, and when a copy is complete.

The first member reports each checkpoint that all ranks have written. Members copy one checkpoint at a time: their parts
are then of the same one, also if copying takes longer than the interval between checkpoints, which skips some.
The metrics and the journal of a training, or the progress of an evaluation, are copied into the controller's folder
while they grow. The journal in that folder has the phases of all attempts, although their first hosts may differ.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from conf.schema.run import Run
from contract.amounts import size
from contract.files import write_atomically
from contract.signs_of_life import JOURNAL
from tasks.gang.controller_link import Lookout
from tasks.gang.copies import Copies
from tasks.gang.history import spent
from tasks.gang.history.logs import Log
from tasks.gang.messages import Member

TICK = 1.0
REPORTED = 30.0  # seconds between lines about files that hosts fetch, or a store that does not answer


class Collector:
    """Thread that works until the attempt is closed. It may block for as long as the store does."""

    def __init__(self, copies: Copies, lookout: Lookout, run: Run, followed: list[Path], say: Callable[[str], None]):
        self._copies, self._lookout, self._run, self._say = copies, lookout, run, say
        first = lookout.word.order[0]
        files = followed if first in lookout.word.apart else []
        self._logs = {path: Log(lookout.board, f"{first}/{path.name}", "") for path in files}
        self._journal: str | None = ""  # the first host's, until it has the start of this attempt
        self._began, self._reported, self._abandoned = 0.0, time.monotonic(), 0
        threading.Thread(target=self._collect, daemon=True, name="copies").start()

    def _collect(self) -> None:
        while not self._lookout.word.closed:
            try:
                self._work()
            except Exception as error:  # the store does not answer: try again
                self._report(f"copies: {error}")
            time.sleep(TICK)

    def _work(self) -> None:
        word, nodes = self._lookout.word, dict(self._lookout.nodes)
        members = [nodes[k] for k in word.order]
        if not word.start:
            self._start(members)
        self._follow()
        if word.copy > word.copied:
            if all(member.copied >= word.copy for member in members):
                self._complete(word.copy)
        elif members[0].saved > max(word.copied, self._abandoned):
            self._began = time.monotonic()
            self._lookout.say(copy=members[0].saved)

    def _start(self, members: list[Member]) -> None:
        if all(member.ready for member in members):
            self._lookout.say(start=True)
        else:
            fetched = [member.fetched for member in members if member.fetched and not member.ready]
            done, total = (size(sum(column)) for column in zip(*fetched, strict=True)) if fetched else ("0", "0")
            self._report(f"{sum(not member.ready for member in members)} hosts fetch their files: {done} of {total}")

    def _report(self, line: str) -> None:
        if time.monotonic() - self._reported > REPORTED:
            self._reported = time.monotonic()
            self._say(line)

    def _follow(self) -> None:
        for path, log in self._logs.items():
            is_new = log.piece == 0
            lines = "".join(f"{line}\n" for line in log.lines())
            if path.name == JOURNAL and self._journal is not None:
                self._begin_journal(path, lines)
            elif lines and is_new:
                write_atomically(path, lines, durable=False)
            elif lines:
                with path.open("a") as file:
                    file.write(lines)

    def _begin_journal(self, path: Path, lines: str) -> None:
        """Append this attempt's phases to those of earlier attempts, which the first host may lack."""
        self._journal = (self._journal or "") + lines
        attempt = self._lookout.board.attempt
        if own := spent.since(self._journal, attempt):
            before = path.read_text("utf-8", "replace") if path.exists() else ""
            write_atomically(path, before.removesuffix(spent.since(before, attempt)) + own, durable=False)
            self._journal = None

    def _complete(self, step: int) -> None:
        """Record the checkpoint, and remove those that the run no longer needs."""
        board, copies, keep = self._lookout.board, self._copies, self._run.checkpoint
        files = copies.complete(step, board, self._lookout.word.order)
        if files is None:
            self._abandoned = step
            self._lookout.say(copy=self._lookout.word.copied)
            self._say(f"checkpoint {step}: a host had removed its part before it was copied")
            return
        self._lookout.say(copied=step)
        bytes_copied, seconds = sum(file.size for file in files.values()), time.monotonic() - self._began
        self._say(f"checkpoint {step}: {size(bytes_copied)} are in the store after {seconds:.0f} s")
        board.store.delete(f"{board.place}/parts/{step}")
        for other in {*copies.steps()} - {*copies.needed(keep.keep, keep.keep_best)}:
            copies.remove(other)
