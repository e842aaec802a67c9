"""All members on this host: to rehearse a gang, and to train several small layouts' worth of GPUs without a network.

Members are children under tasks/guard.py and end with this process. Each gets its share of the GPUs.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Run
from tasks.faults import Fault
from tasks.gang.board import Board
from tasks.gang.engines import command
from tasks.launch import ROOT

LEAVE_WITHIN = 20.0


@dataclass(frozen=True)
class Members:
    processes: list[subprocess.Popen]

    def alive(self) -> dict[int, bool | None]:
        return {node: process.poll() is None for node, process in enumerate(self.processes)}

    def waits(self) -> str | None:
        return None

    def words(self) -> tuple[str, ...]:
        return ()

    def cancel(self) -> None:
        for process in self.processes:
            if process.stdin and not process.stdin.closed:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(LEAVE_WITHIN)
            except subprocess.TimeoutExpired:  # the kernel then ends what it guards
                process.kill()
                process.wait()


def turn(run: Run) -> str | None:
    return None


def capacity(run: Run) -> str | None:
    here, needed = _gpus(), run.world
    if here and needed > here:
        raise Fault(
            f"gang.engine: local, but layout.nodes {run.layout.nodes} x layout.gpus_per_node "
            f"{run.layout.gpus_per_node} is more than the {here} GPUs of this host; prefect, slurm or kubernetes"
        )
    return None


def start(run: Run, board: Board, n: int, without: tuple[str, ...] = ()) -> Members:
    logs = Path(run.paths.logs)
    logs.mkdir(parents=True, exist_ok=True)
    each, processes = run.layout.gpus_per_node, []
    for node in range(n):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "GANG_ADDRESS": "127.0.0.1"}
        if _gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(node * each, (node + 1) * each)))
        with (logs / f"member{node}.log").open("a") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tasks.guard", sys.executable, "-m", *command(board, node)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            )
    return Members(processes)


def _gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").iterdir())
