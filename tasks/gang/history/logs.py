"""Logs of the ranks of a gang's attempt, read from the store piece by piece, also while they grow.

    gangs/<gang>/<attempt>/logs/<member>/rank00003.out.00000

Pieces are read by number and never listed, as their number grows with the run.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tasks.gang.board import Board, last
from tasks.gang.history.timeline import Host


@dataclass
class Log:
    """One file; each reading continues after the previous one."""

    board: Board
    name: str  # such as 0/rank00000.out
    title: str
    piece: int = 0
    rest: bytes = b""  # beginning of a line whose end has not been read yet

    def lines(self) -> Iterator[str]:
        """New complete lines."""
        while (block := self._read(self.piece)) is not None:
            self.piece += 1
            *whole, self.rest = (self.rest + block).split(b"\n")
            yield from map(_text, whole)

    def unended(self) -> list[str]:
        """The last line if it has no newline, else nothing."""
        rest, self.rest = self.rest, b""
        return [_text(rest)] if rest else []

    def tail(self, count: int) -> list[str]:
        """The last complete lines. A later lines() continues after them."""
        self.piece = end = last(lambda count: self._read(count - 1) is not None)
        whole, block = [], b""
        while end > 0 and len(whole) <= count:
            end -= 1
            block = (self._read(end) or b"") + block
            *whole, self.rest = block.split(b"\n")
        return [_text(line) for line in whole[max(0, len(whole) - count) :]]

    def _read(self, piece: int) -> bytes | None:
        entry = self.board.store.read(f"{self.board.place}/logs/{self.name}.{piece:05d}")
        return entry[0] if entry else None


def of_rank(board: Board, hosts: tuple[Host, ...], rank: int, kind: str) -> Log | None:
    host = next((host for host in hosts if host.first <= rank < host.first + host.ranks), None)
    return _of(board, host, rank, kind) if host else None


def of_host(board: Board, host: Host, kind: str) -> list[Log]:
    return [_of(board, host, rank, kind) for rank in range(host.first, host.first + host.ranks)]


def of_torchrun(board: Board, host: Host) -> Log:
    return Log(board, f"{host.member}/torchrun.log", f"torchrun on {host.name}")


def hosts_of(board: Board) -> tuple[Host, ...]:
    """Hosts from the board, for a gang without a history; empty until all hosts have joined."""
    order = (board.read("gang.json") or {}).get("order", [])
    each = yaml.safe_load(board.text("resolved.yaml"))["layout"]["gpus_per_node"] if order else 0
    nodes = [board.read(f"nodes/{member}.json") or {} for member in order]
    return tuple(
        Host(node.get("host", ""), node.get("address", ""), member, place * each, each)
        for place, (member, node) in enumerate(zip(order, nodes, strict=True))
    )


def _of(board: Board, host: Host, rank: int, kind: str) -> Log:
    return Log(board, f"{host.member}/rank{rank:05d}.{kind}", f"rank {rank} on {host.name}")


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
