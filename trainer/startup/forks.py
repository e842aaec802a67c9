"""Ranks as forks of the command that they belong to, where no GPU is used: what all of them import is imported once.

torchrun imports torch for itself, then starts each rank as a process that imports all of Megatron anew: on two cores
that is half of what a small conversion takes. Forks are watched as torchrun watches its ranks: the first that fails
ends the others, and all end with the command. A process that has touched a GPU cannot be forked, so commands that
train are started by torchrun.
"""

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import IO

from conf import network
from contract.processes import end_with_parent
from trainer.patches import store_address

PATIENCE = 30.0  # seconds that a rank has to end after SIGTERM, as torchrun gives it
HOST = "127.0.0.1"


def share(count: int) -> None:
    """Have each of so many ranks take its share of the cores. Before torch is loaded."""
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(network.sockets())


def run(work: Callable[[], None], count: int, forward: Callable[[IO[str]], None]) -> int:
    """Run the work in so many forks of this process. Returns 0, or the exit code of the first that failed.

    forward(lines) is given what they say on stderr. SIGTERM is passed on to them.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = os.pipe()
    ends = [context.Pipe(duplex=False) for _ in range(count)]
    given = [(work, rank, count, ends[rank][0], writer, os.getpid()) for rank in range(count)]
    ranks = [context.Process(target=_rank, args=one) for one in given]
    with warnings.catch_warnings():
        # Of a fork beside a thread: the one that renews who owns the folder waits, and holds nothing that a fork wants.
        warnings.simplefilter("ignore", DeprecationWarning)
        for rank in ranks:
            rank.start()
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
    with os.fdopen(reader) as lines:
        forwarding = threading.Thread(target=forward, args=(lines,))
        forwarding.start()
        try:
            store = _meeting_place()
            for _, told in ends:
                told.send(store.port)
            return _watch(ranks)
        except KeyboardInterrupt:
            return _end(ranks)
        finally:
            _end(ranks)  # none is left, unless the lines above have failed
            forwarding.join()


def _meeting_place():
    """Store by which the ranks meet. It has threads, so that it begins behind the forks, at a port that is free."""
    return store_address.listen(HOST, wait_for_workers=False)


def _watch(ranks: list[ForkProcess]) -> int:
    left = list(ranks)
    while left:
        wait([rank.sentinel for rank in left])
        for rank in left:
            rank.join(0)
        codes = [rank.exitcode for rank in ranks]  # looked at once: one that runs may have failed a moment later
        if any(codes):
            _tell_of_killed(ranks)
            return _end(ranks)
        left = [rank for rank, code in zip(ranks, codes, strict=True) if code is None]
    return 0


def _tell_of_killed(ranks: list[ForkProcess]) -> None:
    for number, rank in enumerate(ranks):
        if rank.exitcode == -signal.SIGKILL:
            print(f"rank {number} was killed, as the kernel does where memory runs out", file=sys.stderr)


def _end(ranks: list[ForkProcess]) -> int:
    """End the ranks that are left. Returns the code of one that has failed by itself, or else of any."""
    failed = [rank.exitcode for rank in ranks if rank.exitcode]
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(PATIENCE)
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    return next(iter(failed + [rank.exitcode for rank in ranks if rank.exitcode]), 0)


def _rank(work: Callable[[], None], rank: int, count: int, told: Connection, errors: int, command: int) -> None:
    end_with_parent()
    if os.getppid() != command:
        os._exit(1)
    # Ctrl-C in a terminal is everybody's: the command says what there is to say. One in the background ignores it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(errors, sys.stderr.fileno())
    port = told.recv()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    # The store is the command's, as torchrun's agent has one for its ranks.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    work()
