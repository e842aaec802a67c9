"""Start ranks by forking the command, if it uses no GPU: the modules that all ranks need are imported once.

torchrun imports torch, and then each rank imports all of Megatron again. On two cores this takes half the time of a
small conversion. Forks are supervised as by torchrun: the first fork that fails ends the others, and all end with the
command. A process that has used a GPU cannot be forked, so commands that train use torchrun.
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

PATIENCE = 30.0  # seconds for a rank to end after SIGTERM, as with torchrun
LOOKED = 0.02  # seconds between two calls of until()
HOST = "127.0.0.1"


def share(count: int) -> None:
    """Give each of `count` ranks its share of the cores. Call it before torch is loaded."""
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(network.sockets())


def run(
    work: Callable[[], None], count: int, forward: Callable[[IO[str]], None], until: Callable[[], bool] | None = None
) -> int:
    """Run the work in `count` forks of this process. Returns 0, or the exit code of the first that failed.

    forward(lines) gets their lines on stderr. SIGTERM is sent on to them. If ranks fail together, a killed one counts
    as the first: the others have lost their connection to it. After a failure, the others have PATIENCE seconds to end.

    With until(), they are killed at once. When until() becomes true, every rank is killed, like when a host is lost.
    """
    context = multiprocessing.get_context("fork")
    reader, writer = os.pipe()
    ends = [context.Pipe(duplex=False) for _ in range(count)]
    arguments = [(work, rank, count, ends[rank][0], writer, os.getpid()) for rank in range(count)]
    ranks = [context.Process(target=_rank, args=of_rank) for of_rank in arguments]
    with warnings.catch_warnings():
        # Python warns of forks next to threads. The thread that renews the folder's ownership holds no lock here.
        warnings.simplefilter("ignore", DeprecationWarning)
        for rank in ranks:
            rank.start()
    os.close(writer)
    before = signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
    with os.fdopen(reader) as lines:
        forwarding = threading.Thread(target=forward, args=(lines,))
        forwarding.start()
        try:
            store = store_address.listen(HOST, wait_for_workers=False)  # after the forks, because it has threads
            for _, port in ends:
                port.send(store.port)
            return _watch(ranks, until)
        except KeyboardInterrupt:
            return _end(ranks)
        finally:
            _end(ranks)  # all have ended already, unless the lines above have failed
            forwarding.join()
            signal.signal(signal.SIGTERM, before)


def _watch(ranks: list[ForkProcess], until: Callable[[], bool] | None = None) -> int:
    running = list(ranks)
    while running:
        wait([rank.sentinel for rank in running], None if until is None else LOOKED)
        if until is not None and until():
            for rank in running:
                rank.kill()
            return _end(ranks, patience=0)
        for rank in running:
            rank.join(0)
        codes = [rank.exitcode for rank in ranks]  # read once: a rank may fail between two reads
        if any(codes):
            for number, code in enumerate(codes):
                if code == -signal.SIGKILL:
                    print(f"rank {number} was killed, probably by the kernel because memory ran out", file=sys.stderr)
            return _end(ranks, PATIENCE if until is None else 0)
        running = [rank for rank, code in zip(ranks, codes, strict=True) if code is None]
    return 0


def _end(ranks: list[ForkProcess], patience: float = PATIENCE) -> int:
    """End the ranks that still run. Returns the code of a rank that failed before, or else any other code."""
    failed = [rank.exitcode for rank in ranks if rank.exitcode]
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(patience)
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    failed = failed or [rank.exitcode for rank in ranks if rank.exitcode]
    return next((code for code in failed if code < 0), failed[0] if failed else 0)


def _rank(work: Callable[[], None], rank: int, count: int, ports: Connection, errors: int, command: int) -> None:
    end_with_parent(command)
    # A terminal sends Ctrl-C to all processes: ranks end silently, and the command reports it. A command in the
    # background ignores it.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(errors, sys.stderr.fileno())
    port = ports.recv()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    # The command has the store for its ranks, as torchrun's agent does.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    work()
