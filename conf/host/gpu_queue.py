"""Queue for the GPUs of this host: who is given which of the free ones, first come, first served.

    given(wishes, free, order) -> {number: GPUs}    of those that are given some now; a wish has all it wants, or none
    choose(free, count, order)                      neighbours where possible

A wish that cannot be met now keeps later ones from every GPU that it may use: one that wants all of them waits no
longer than those that had them. Wishes of one flow exchange their places by rank, so that training comes before an
evaluation that has asked earlier. All of it is arithmetic; conf/host/gpu_locks.py has the locks.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wish:
    """A wait for so many of these GPUs."""

    what: str  # shown to those that wait
    gpus: tuple[str, ...]
    count: int
    number: int  # of arrival
    flow: str = ""
    rank: int = 0  # among those of the flow: the lowest is first
    since: float = 0.0
    pid: int = 0


def in_order(wishes: Iterable[Wish]) -> list[Wish]:
    """The wishes, first served first."""
    flows: dict[str, list[Wish]] = {}
    for one in wishes:
        flows.setdefault(one.flow or f"{one.number} alone", []).append(one)
    placed = []
    for those in flows.values():
        numbers = sorted(one.number for one in those)
        ranked = sorted(those, key=lambda one: (one.rank, one.number))
        placed += [(numbers[place], one) for place, one in enumerate(ranked)]
    return [one for _, one in sorted(placed, key=lambda pair: pair[0])]


def given(wishes: Iterable[Wish], free: Iterable[str], order: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """GPUs that each wish is given now, by its number."""
    left, found = set(free), {}
    for one in in_order(wishes):
        able = [gpu for gpu in one.gpus if gpu in left]
        if len(able) >= one.count:
            found[one.number] = choose(able, one.count, order)
            left -= {*found[one.number]}
        else:
            left -= {*one.gpus}
    return found


def choose(free: Sequence[str], count: int, order: Sequence[str]) -> tuple[str, ...]:
    """Choose so many of the free GPUs: neighbours in the shortest row that is long enough, or else the first ones."""
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
