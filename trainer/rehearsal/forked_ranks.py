"""Ranks as forks of this process, for many short runs: Megatron is imported once instead of once per rank and run.

Call import_all() first, and start no threads or process group before or after it. Only for rehearsals and tests: a real
run's ranks are started by torchrun, which monitors them.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

from conf import families
from conf.schema.run import Run
from trainer.startup import device, entry

PORTS = range(20000, 32768)  # below those of ip_local_port_range


def import_all() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count())  # one thread per rank
    device.start()
    import megatron.bridge.training.finetune
    import megatron.bridge.training.gpt_step  # noqa: F401

    from trainer.megatron import bridges

    for config in families.tiny().values():
        bridges.load(config)


def call(command: Callable[[Run], None], run: Run, log: Path, until: Callable[[], bool] = lambda: False) -> int:
    """Run a command's main on run.world ranks. Return 0, or the first failed rank's code; `log` gets their output.

    If ranks fail together, a killed one counts as the first: the others have lost their connection to it. When until()
    becomes true, every rank is killed with SIGKILL, like when a host is lost.
    """
    port, fault = _free_port(), log.with_suffix(".fault")
    log.parent.mkdir(parents=True, exist_ok=True)
    fault.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(command, run, rank, port, log, fault)) for rank in range(run.world)]
    for rank in ranks:
        rank.start()
    code = 0
    while not code and any(rank.is_alive() for rank in ranks):
        time.sleep(0.02)
        code = _failed(ranks) or (-signal.SIGKILL if until() else 0)
    for rank in ranks:
        if code:
            rank.kill()
        rank.join()
    if fault.exists():  # of the first rank that failed, like in a real run
        with log.open("a") as out:
            out.write(fault.read_text())
    return code or _failed(ranks)


def _failed(ranks: list[ForkProcess]) -> int:
    codes = [rank.exitcode for rank in ranks if rank.exitcode]
    return next((code for code in codes if code < 0), next(iter(codes), 0))


def _free_port() -> int:
    """Return a free port outside the range that the kernel gives to connections before rank 0 listens."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free on 127.0.0.1")


def _rank(command, run: Run, rank: int, port: int, log: Path, fault: Path) -> None:
    with log.open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.world), LOCAL_WORLD_SIZE=str(run.world))
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), entry.FAULT_FILE: str(fault)})
    import torch

    # OpenMP's threads are not forked. An operation that needs threads of the parent process would wait forever.
    torch.set_num_threads(1)
    with entry.faults_in_one_line():
        command(run)
