"""Engines that start a process group on each of N hosts, with one interface; conf/schema/named.py has their names.

An engine is a module with four functions. On each host it starts `python -m tasks.run.guard --grace=S python -m
tasks.gang.member --store URI --gang ID --attempt N --node K`.

    turn(demand) -> str | None      name of the lock that gangs take turns with; None if the scheduler starts all hosts
                                    of a gang at once or none
    capacity(demand, without) -> str | None     None = enough hosts are free, else the reason for waiting; Fault if it
                                    can never have enough
    available(demand, without) -> int | None    number of hosts except these, free or not; None = unknown
    start(demand, board, n, without) -> Handle      members 0 to n - 1 of the board's attempt; on hosts in `without`
                                    only if there are too few others. Fault if it can never start them; any other
                                    error counts as a failed attempt

An engine may also have two more:

    submission(demand, board) -> str    the text that it submits; flows/gang.py prints it
    another(demand, board, handle, without, lost) -> int | None     starts one more member of the attempt if a host is
                                    free, and returns its number; members in `lost` have ended, or are cut off

`without` has the hosts to exclude. It begins with the host that failed last, which is the last to be used again.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from conf.schema import named
from conf.schema.clusters import Kubernetes, Slurm
from conf.schema.run import Run
from conf.schema.sections import Gang
from tasks.gang.board import Board
from tasks.run import guard

LAST_WORDS = 9  # seconds that a member needs after its grace, to report how it ended


@dataclass(frozen=True)
class Demand:
    """The hosts that a gang requests from an engine, and each engine's settings for them."""

    name: str  # of the run
    nodes: int
    gpus_per_node: int
    gang: Gang
    slurm: Slurm
    kubernetes: Kubernetes
    logs: str

    @classmethod
    def of(cls, run: Run) -> Self:
        layout, nodes = run.layout, run.layout.nodes + run.gang.spares
        return cls(run.name, nodes, layout.gpus_per_node, run.gang, run.slurm, run.kubernetes, run.paths.logs)


class Handle(Protocol):
    def alive(self) -> dict[int, bool | None]:
        """State of each member: True = runs or waits to run, False = has ended, None = unknown. It never waits."""
        ...

    def waits(self) -> str | None:
        """The reason for waiting while the gang is in the engine's queue. Time in that queue does not count."""
        ...

    def words(self) -> tuple[str, ...]:
        """The engine's messages on how members ended."""
        ...

    def cancel(self) -> None:
        """End the members that still run or wait, and remove them from the engine's queue."""
        ...


class Engine(Protocol):
    turn: Callable[[Demand], str | None]
    capacity: Callable[[Demand, tuple[str, ...]], str | None]
    available: Callable[[Demand, tuple[str, ...]], int | None]
    start: Callable[[Demand, Board, int, tuple[str, ...]], Handle]
    another: Callable[[Demand, Board, Any, tuple[str, ...], set[int]], int | None]  # optional


def engine_of(run: Run) -> Engine:
    """Return the module of gang.engine: a file here, or what an entry point of an installed package loads."""
    name = run.gang.engine
    if name not in named.ENGINES:
        return named.plugin(named.ENGINE_GROUP, name)
    return importlib.import_module(f"tasks.gang.engines.{name}")  # type: ignore[return-value]


def grace(gang: Gang) -> int:
    """Seconds that each member has to end, in which it may save a checkpoint and report it."""
    return gang.grace + LAST_WORDS


def spared(without: tuple[str, ...], enough: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """The hosts to exclude, shortened from its end until there are enough others."""
    while without and not enough(without):
        without = without[:-1]
    return without


def guarded(gang: Gang, board: Board, node: str, python: str = sys.executable) -> list[str]:
    """The command of a member under its guard; `node` is its number, or a variable that holds it."""
    return guard.guarded([python, "-m", *command(board, node)], grace(gang), python)


def command(board: Board, node: str) -> list[str]:
    """Arguments after python -m that start a member."""
    place = ["--store", board.store.uri, "--gang", board.gang, "--attempt", str(board.attempt), "--node", node]
    return ["tasks.gang.member", *place]
