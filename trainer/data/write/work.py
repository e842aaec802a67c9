"""Work on all chunks of all sources, by several processes. Finished chunks are not processed again."""

import collections
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
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
from trainer.data.write.chunks import Plan
from trainer.data.write.progress import Progress
from trainer.data.write.spool import ChunkFile, Spool

AHEAD = 2  # chunks queued per process
SHOWN = 5  # bad rows in a fault

_plan: Plan  # for the processes forked from this one


@dataclass(frozen=True)
class Done:
    """Results of all chunks."""

    paths: list[Path]
    rows: list[int]  # rows read of each part
    left: int  # rows that were not chosen
    copies: int  # those of them that occurred before


def run(plan: Plan, parts: list[Part], progress: Progress) -> Done:
    global _plan
    _plan = plan
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per process
    processes = plan.data.processes or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")  # the tokenizer is loaded once and shared
    with ProcessPoolExecutor(processes, context, _start, (os.getpid(),)) as pool:
        try:
            return _run(plan, parts, progress, pool, AHEAD * processes)
        except BrokenProcessPool:
            raise Fault(
                "a process of preparation was killed, probably because memory ran out: reduce data.processes; "
                "the next start resumes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _run(plan: Plan, parts: list[Part], progress: Progress, pool: ProcessPoolExecutor, ahead: int) -> Done:
    chosen: list[np.ndarray | None] | None = None
    left = copies = 0
    if choose.first_pass(plan.data):
        progress.begin("choose")
        scanned = _each(plan, parts, progress, pool, ahead, "scan", lambda number: None)
        chosen, left, copies = _choose(scanned, plan.data)
    progress.begin("tokenize")
    paths = _each(plan, parts, progress, pool, ahead, "tokens", lambda number: chosen[number] if chosen else None)
    return Done(paths, progress.rows_of(len(parts)), left, copies)


def _each(
    plan: Plan,
    parts: list[Part],
    progress: Progress,
    pool: ProcessPoolExecutor,
    ahead: int,
    kind: str,
    chosen: Callable[[int], np.ndarray | None],
) -> list[Path]:
    """Return the files of all chunks, in order. The pool writes missing ones."""
    paths: list[Path] = []
    waiting: collections.deque[tuple[sources.Chunk, Path, Future | None]] = collections.deque()
    for number, chunk in enumerate(_chunks(plan, parts, kind)):
        path = chunks.path(plan.folder, chunk.part, chunk.number, kind)
        future = None if path.exists() else pool.submit(_do, kind, chunk, path, chosen(number))
        waiting.append((chunk, path, future))
        while len(waiting) > ahead:
            paths.append(_finish(plan, *waiting.popleft(), progress))
    while waiting:
        paths.append(_finish(plan, *waiting.popleft(), progress))
    return paths


def _chunks(plan: Plan, parts: list[Part], kind: str) -> Iterator[sources.Chunk]:
    for number, part in enumerate(parts):

        def done(chunk: int, number: int = number) -> bool:
            return chunks.path(plan.folder, number, chunk, kind).exists()

        yield from sources.chunks(part, number, done)


def _do(kind: str, chunk: sources.Chunk, path: Path, chosen: np.ndarray | None) -> None:
    if kind == "scan":
        chunks.scan(_plan, chunk, path)
    else:
        chunks.encode(_plan, chunk, path, chosen)


def _finish(plan: Plan, chunk: sources.Chunk, path: Path, future: Future | None, progress: Progress) -> Path:
    if future:
        future.result()
    file = ChunkFile(path)
    facts = file.facts
    file.close()
    _refuse(facts["dropped"], plan.data)
    progress.update(chunk.part, chunk.size, facts["read"], future is not None)
    return path


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


def _choose(paths: list[Path], data: Data) -> tuple[list[np.ndarray | None], int, int]:
    spool = Spool(paths)
    keys, parts = spool.column("key", np.uint64), spool.column("part", np.int16)
    taken = choose.chosen(keys, parts, data)
    copies = choose.copies(keys) if data.duplicates == "drop" else 0
    masks: list[np.ndarray | None] = list(np.split(taken, spool.starts[1:-1]))
    return masks, int(len(keys) - taken.sum()), copies


def _start(parent: int) -> None:
    """Make a worker end with its parent, even if the parent is killed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getppid() != parent:
        os._exit(1)
