"""Work on all chunks of all sources, by several processes. Finished chunks are not processed again."""

import collections
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.schema.data import Data, Part
from contract.faults import Fault
from contract.processes import end_with_parent
from trainer.data.read import choose, sources
from trainer.data.write import chunks
from trainer.data.write.progress import Progress
from trainer.data.write.spool import ChunkFile, Spool

AHEAD = 2  # chunks queued per process
SHOWN = 5  # bad rows in a fault

_plan: chunks.Plan  # for the processes forked from this one


@dataclass(frozen=True)
class Done:
    """Results of all chunks."""

    paths: list[Path]
    rows: list[int]  # rows read of each part
    left: int  # rows that were not chosen
    copies: int  # of these, the copies of earlier rows


def run(plan: chunks.Plan, parts: list[Part], progress: Progress) -> Done:
    global _plan
    _plan = plan
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process
    processes = plan.data.processes or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")  # the tokenizer is loaded once and shared
    with ProcessPoolExecutor(processes, context, _start, (os.getpid(),)) as pool:
        try:
            return _Work(plan, parts, progress, pool, AHEAD * processes).all()
        except BrokenProcessPool:
            raise Fault(
                "a process of preparation was killed, probably because memory ran out: reduce data.processes; "
                "the next start resumes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass
class _Work:
    plan: chunks.Plan
    parts: list[Part]
    progress: Progress
    pool: ProcessPoolExecutor
    ahead: int  # chunks queued at once

    def all(self) -> Done:
        chosen: list[np.ndarray] = []
        left = copies = 0
        if choose.first_pass(self.plan.data):
            self.progress.begin("choose")
            chosen, left, copies = _choose(self._files("scan", []), self.plan.data)
        self.progress.begin("tokenize")
        paths = self._files("tokens", chosen)
        return Done(paths, self.progress.rows_of(len(self.parts)), left, copies)

    def _files(self, kind: str, chosen: list[np.ndarray]) -> list[Path]:
        """Return the files of all chunks, in order. The pool writes missing ones."""
        paths: list[Path] = []
        waiting: collections.deque[tuple[sources.Chunk, Path, Future | None]] = collections.deque()
        for number, chunk in enumerate(self._chunks(kind)):
            path = chunks.path(self.plan.folder, chunk.part, chunk.number, kind)
            rows = chosen[number] if chosen else None
            waiting.append((chunk, path, None if path.exists() else self.pool.submit(_do, kind, chunk, path, rows)))
            while len(waiting) > self.ahead:
                paths.append(self._finish(*waiting.popleft()))
        return paths + [self._finish(*item) for item in waiting]

    def _chunks(self, kind: str) -> Iterator[sources.Chunk]:
        for number, part in enumerate(self.parts):

            def done(chunk: int, number: int = number) -> bool:
                return chunks.path(self.plan.folder, number, chunk, kind).exists()

            yield from sources.chunks(part, number, done)

    def _finish(self, chunk: sources.Chunk, path: Path, future: Future | None) -> Path:
        if future:
            future.result()
        file = ChunkFile(path)
        file.close()
        _refuse(file.facts["dropped"], self.plan.data)
        self.progress.update(chunk.part, chunk.size, file.facts["read"], future is not None)
        return path


def _do(kind: str, chunk: sources.Chunk, path: Path, chosen: np.ndarray | None) -> None:
    if kind == "scan":
        chunks.scan(_plan, chunk, path)
    else:
        chunks.encode(_plan, chunk, path, chosen)


def _refuse(dropped: dict[str, Any], data: Data) -> None:
    """Raise a Fault for rows that the configuration does not allow."""
    wrong = {
        reason: entry
        for reason, entry in dropped.items()
        if (data.too_long if reason in chunks.TOO_LONG else data.bad_rows) == "error"
    }
    lines = [
        ": ".join(filter(None, (sample["place"], sample["field"], reason, sample["shown"])))
        for reason, entry in wrong.items()
        for sample in entry["samples"]
    ]
    if lines:
        more = sum(entry["count"] for entry in wrong.values()) - len(lines[:SHOWN])
        key = "too_long" if set(wrong) <= set(chunks.TOO_LONG) else "bad_rows"
        lines[SHOWN:] = [f"and {more} more rows near these"] if more else []
        raise Fault("\n".join([*lines, f"data.{key}=drop leaves such rows out, counts them and shows some"]))


def _choose(paths: list[Path], data: Data) -> tuple[list[np.ndarray], int, int]:
    """Return a mask of the chosen rows of each chunk, the number of other rows, and how many of these are copies."""
    spool = Spool(paths)
    keys, parts = spool.column("key", np.uint64), spool.column("part", np.int16)
    taken = choose.chosen(keys, parts, data)
    copies = choose.copies(keys) if data.duplicates == "drop" else 0
    return np.split(taken, spool.starts[1:-1]), int(len(keys) - taken.sum()), copies


def _start(parent: int) -> None:
    """Make a worker end with its parent, even if the parent is killed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getppid() != parent:
        os._exit(1)
