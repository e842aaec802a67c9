"""Engine for members on this host: to rehearse a gang, or to use the GPUs of one host like several small hosts.

Members are child processes under tasks/run/guard.py and end with this process. Each represents a host named NAME/0,
NAME/1 and so on, which has an equal share of the GPUs. Without GPUs there are as many hosts as the run needs. Excluded
hosts have these names too.
"""

import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from conf.host import gpu_locks, nvidia_smi
from conf.schema.named import ENGINES, HERE
from contract.faults import Fault
from tasks.gang.board import Board
from tasks.gang.engines import Demand, guarded, spared
from tasks.run.launch import ROOT

LEAVE_WITHIN = 35.0  # the guard kills earlier
TAKEN_WITHIN = 10.0


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
            except subprocess.TimeoutExpired:  # the kernel then ends the guarded processes
                process.kill()
                process.wait()


def turn(demand: Demand) -> str | None:
    return None


def capacity(demand: Demand, without: tuple[str, ...] = ()) -> str | None:
    here, nodes, each = _gpus(), demand.nodes, demand.gpus_per_node
    if here and nodes * each > here:
        raise Fault(
            f"gang.engine: {HERE}, but {nodes} hosts with {each} GPUs each are more than the {here} GPUs of this host; "
            f"{', '.join(other for other in ENGINES if other != HERE)}"
        )
    owner = gpu_locks.claimed(_of(_hosts(each, nodes, without), each))
    return f"{nodes * each} GPUs of this host: {owner}" if owner else None


def available(demand: Demand, without: tuple[str, ...] = ()) -> int | None:
    here = _gpus() // demand.gpus_per_node or demand.nodes
    return sum(_name(host) not in without for host in range(here))


def start(demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> Members:
    logs = Path(demand.logs)
    logs.mkdir(parents=True, exist_ok=True)
    each, processes = demand.gpus_per_node, []
    hosts = _hosts(each, n, without)
    until = time.monotonic() + TAKEN_WITHIN  # another job may have taken the GPUs after capacity()
    hold = gpu_locks.take(f"gang {board.gang}", lambda _: None, lambda: time.monotonic() > until, _of(hosts, each))
    if hold is None:
        raise TimeoutError("others have taken the GPUs of this host")
    for node, host in enumerate(hosts):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "GANG_ADDRESS": "127.0.0.1"}
        environment |= {"GANG_HOST": _name(host)} | hold.environment
        if _gpus():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(host * each, (host + 1) * each)))
        with (logs / f"member{node}.log").open("a") as log:
            processes.append(
                subprocess.Popen(
                    guarded(demand.gang, board, str(node)),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=hold.descriptors,  # all of them: the GPUs become free when the last member has ended
                )
            )
    hold.close()
    return Members(processes)


def _hosts(each: int, n: int, without: tuple[str, ...]) -> list[int]:
    """The hosts for n members with `each` GPUs each."""
    hosts = range(_gpus() // each or n + len(without))
    out = spared(without, lambda out: sum(_name(host) not in out for host in hosts) >= n)
    return [host for host in hosts if _name(host) not in out][:n]


def _of(hosts: list[int], each: int) -> tuple[str, ...]:
    """GPUs of these hosts."""
    gpus = nvidia_smi.listed()
    return tuple(gpu for host in hosts for gpu in gpus[host * each : (host + 1) * each])


def _name(host: int) -> str:
    return f"{socket.gethostname()}/{host}"


def _gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").iterdir())
