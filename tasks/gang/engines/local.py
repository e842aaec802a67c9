"""Engine for members on this host: to rehearse a gang, and to train on GPUs as several small hosts without a network.

Members are children under tasks/run/guard.py and end with this process. Each stands for a host, called NAME/0 and so
on, which has its share of the GPUs. Without GPUs there are as many hosts as the run wants. The hosts to be left out are
among these.
"""

import os
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from conf.host import gpu_locks, nvidia_smi
from contract.faults import Fault
from tasks.gang.board import Board
from tasks.gang.engines import Demand, guarded, spared
from tasks.run.launch import ROOT

LEAVE_WITHIN = 35.0  # the guard kills sooner
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
            except subprocess.TimeoutExpired:  # the kernel then ends what it guards
                process.kill()
                process.wait()


def turn(demand: Demand) -> str | None:
    return None


def capacity(demand: Demand, without: tuple[str, ...] = ()) -> str | None:
    here, nodes, each = _gpus(), demand.nodes, demand.gpus_per_node
    if here and nodes * each > here:
        raise Fault(
            f"gang.engine: local, but {nodes} hosts with {each} GPUs each are more than the {here} GPUs of this host; "
            "prefect, slurm or kubernetes"
        )
    owner = gpu_locks.wanted(_of(_hosts(each, nodes, without), each))
    return f"{nodes * each} GPUs of this host: {owner}" if owner else None


def available(demand: Demand, without: tuple[str, ...] = ()) -> int | None:
    here = _gpus() // demand.gpus_per_node or demand.nodes
    return sum(_name(host) not in without for host in range(here))


def start(demand: Demand, board: Board, n: int, without: tuple[str, ...] = ()) -> Members:
    logs = Path(demand.logs)
    logs.mkdir(parents=True, exist_ok=True)
    each, processes = demand.gpus_per_node, []
    hosts = _hosts(each, n, without)
    given_up = time.monotonic() + TAKEN_WITHIN  # somebody was faster since capacity() was asked
    hold = gpu_locks.take(f"gang {board.gang}", lambda _: None, lambda: time.monotonic() > given_up, _of(hosts, each))
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
                    pass_fds=hold.descriptors,  # all of them: they are free when the last member is over
                )
            )
    hold.close()
    return Members(processes)


def _hosts(each: int, n: int, without: tuple[str, ...]) -> list[int]:
    """The hosts for n members that have so many GPUs each."""
    there = range(_gpus() // each or n + len(without))
    out = spared(without, lambda out: sum(_name(host) not in out for host in there) >= n)
    return [host for host in there if _name(host) not in out][:n]


def _of(hosts: list[int], each: int) -> tuple[str, ...]:
    """GPUs of these hosts."""
    gpus = nvidia_smi.listed()
    return tuple(gpu for host in hosts for gpu in gpus[host * each : (host + 1) * each])


def _name(host: int) -> str:
    return f"{socket.gethostname()}/{host}"


def _gpus() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").iterdir())
