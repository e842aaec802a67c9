"""Divide work into units. One rank does each unit and records it afterwards, so a later attempt skips it.

Each unit has an entry, a small JSON object, in a folder next to the output, on storage that all ranks share.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from contract import json_object
from contract.files import write_atomically
from trainer.startup import heartbeat
from trainer.weights import atomic_folder

Entry = dict[str, Any]
LARGEST, SMALLEST = 2**28, 2**20  # bytes of a unit
COUNT = 256  # of units, if their size is between these two


def do(
    folder: Path,
    sizes: dict[int, int],
    is_whole: Callable[[int, Entry], bool],
    make: Callable[[int], Entry],
    ahead: Callable[[int], None] = lambda number: None,
    distance: int = 1,
) -> dict[int, Entry]:
    """Do every unit that is missing or no longer valid. Return all entries, on every rank.

    `sizes` has the size of each unit, by number. make() does one unit and returns its entry. ahead() is called for a
    unit before the units that precede it, as many as `distance`, are done.
    """
    rank, ranks = atomic_folder.rank(), atomic_folder.ranks()
    entries = atomic_folder.gather(_entries(folder, sizes))[0]  # rank 0's
    own = share({number: sizes[number] for number in entries}, ranks)[rank]
    broken = {number for number in own if not is_whole(number, entries[number])}
    for number in set().union(*atomic_folder.gather(broken)):
        del entries[number]
    new_entries = {}
    own = share({number: size for number, size in sizes.items() if number not in entries}, ranks)[rank]
    for number in own[:distance]:
        ahead(number)
    for place, number in enumerate(own, distance):
        for following in own[place : place + 1]:
            ahead(following)
        new_entries[number] = make(number)
        write_atomically(folder / f"{number}.json", json.dumps(new_entries[number]), durable=False)
        heartbeat.step(len(new_entries))
    for of_rank in atomic_folder.gather(new_entries):
        entries |= of_rank
    return entries


def enough(size: int) -> int:
    """Return the size of a unit in bytes, for work of this size."""
    return min(max(size // COUNT, SMALLEST), LARGEST)


def cut[Item](sizes: Mapping[Item, int], least: int) -> list[list[Item]]:
    """Cut items into units, in order. All units but the last have at least this size."""
    units: list[list[Item]] = []
    size = least
    for item, of_item in sizes.items():
        if size >= least:
            units.append([])
            size = 0
        units[-1].append(item)
        size += of_item
    return units


def share(sizes: dict[int, int], ranks: int) -> list[list[int]]:
    """Assign numbers to ranks with about equal total sizes.

    Each rank's numbers are in order but start at a different place, because neighbouring units are in the same file.
    """
    loads, assigned = [0] * ranks, [[] for _ in range(ranks)]
    for number, size in sorted(sizes.items(), key=lambda one: (-one[1], one[0])):
        least = loads.index(min(loads))
        loads[least] += size + 1
        assigned[least].append(number)
    assigned = [sorted(numbers) for numbers in assigned]
    firsts = [len(numbers) * rank // ranks for rank, numbers in enumerate(assigned)]
    return [numbers[first:] + numbers[:first] for numbers, first in zip(assigned, firsts, strict=True)]


def _entries(folder: Path, numbers: Iterable[int]) -> dict[int, Entry]:
    entries = {number: json_object.read_or_empty(folder / f"{number}.json") for number in numbers}
    return {number: entry for number, entry in entries.items() if entry}
