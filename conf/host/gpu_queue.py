"""Queue for the GPUs of this host: which request gets which of the free GPUs, first come, first served.

    assigned(requests, free, order) -> {number: GPUs}    the requests that get GPUs now; each gets all of them or none
    choose(free, count, order)                           neighbours if possible

A request that has to wait reserves every GPU that it may use: later requests cannot take them. So a request for all
GPUs waits only for their present owners. Requests of one flow are ordered by rank: training comes before an evaluation
that was requested earlier. This module only computes; conf/host/gpu_locks.py has the locks.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A request for `count` of these GPUs."""

    what: str  # the owner's name for processes that wait
    gpus: tuple[str, ...]
    count: int
    number: int  # in the order of arrival
    flow: str = ""
    rank: int = 0  # among the requests of the flow: the lowest is first
    since: float = 0.0
    pid: int = 0


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return the requests in the order in which they are served."""
    flows: dict[str, list[Request]] = {}
    for request in requests:
        flows.setdefault(request.flow or f"{request.number} alone", []).append(request)
    placed = []
    for of_flow in flows.values():
        numbers = sorted(request.number for request in of_flow)
        ranked = sorted(of_flow, key=lambda request: (request.rank, request.number))
        placed += [(numbers[place], request) for place, request in enumerate(ranked)]
    return [request for _, request in sorted(placed, key=lambda pair: pair[0])]


def assigned(requests: Iterable[Request], free: Iterable[str], order: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return the GPUs that requests get now, by the number of the request."""
    left, gpus = set(free), {}
    for request in in_order(requests):
        usable = [gpu for gpu in request.gpus if gpu in left]
        if len(usable) >= request.count:
            gpus[request.number] = choose(usable, request.count, order)
            left -= {*gpus[request.number]}
        else:
            left -= {*request.gpus}
    return gpus


def choose(free: Sequence[str], count: int, order: Sequence[str]) -> tuple[str, ...]:
    """Choose `count` of the free GPUs: neighbours in the shortest row that is long enough, or else the first ones."""
    place = {gpu: number for number, gpu in enumerate(order)}
    ranked = sorted(free, key=lambda gpu: place.get(gpu, len(place)))
    rows: list[list[str]] = []
    for gpu in ranked:
        if rows and gpu in place and place.get(rows[-1][-1], -2) + 1 == place[gpu]:
            rows[-1].append(gpu)
        else:
            rows.append([gpu])
    row = min((row for row in rows if len(row) >= count), key=len, default=ranked)
    return tuple(row[:count])
