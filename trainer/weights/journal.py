"""Work that is cut into units, each done by one rank and noted when it is done, so that a later attempt leaves it out.

The entries of units, small JSON objects, lie in a folder beside what is made, on storage that all ranks see.
"""

import contextlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from contract import json_object
from contract.faults import Fault
from contract.files import write_atomically
from trainer.startup import heartbeat
from trainer.weights import atomic_folder

Entry = dict[str, Any]


def do(
    folder: Path,
    sizes: dict[int, int],
    is_whole: Callable[[int, Entry], bool],
    make: Callable[[int], Entry],
    ahead: Callable[[int], None],
) -> dict[int, Entry]:
    """Have every unit done that is not, or is not whole any more. Returns the entries of all, on every rank.

    `sizes` are those of the units, by their numbers. make() does one of them and returns its entry; ahead() is told
    of each unit before the one that precedes it is done.
    """
    rank, ranks = atomic_folder.rank(), atomic_folder.ranks()
    entries = atomic_folder.gather(_entries(folder, sizes))[0]  # as rank 0 sees them
    mine = share({number: sizes[number] for number in entries}, ranks)[rank]
    broken = {number for number in mine if not is_whole(number, entries[number])}
    for number in set().union(*atomic_folder.gather(broken)):
        del entries[number]
    made = {}
    mine = share({number: size for number, size in sizes.items() if number not in entries}, ranks)[rank]
    for number in mine[:1]:
        ahead(number)
    for place, number in enumerate(mine):
        for following in mine[place + 1 : place + 2]:
            ahead(following)
        made[number] = make(number)
        write_atomically(folder / f"{number}.json", json.dumps(made[number]), durable=False)
        heartbeat.step(len(made))
    for one in atomic_folder.gather(made):
        entries |= one
    return entries


def share(sizes: dict[int, int], ranks: int) -> list[list[int]]:
    """Numbers for each rank, so that sizes add up to about the same.

    They are in their order, but each rank begins elsewhere: units side by side would be of the same file.
    """
    loads, found = [0] * ranks, [[] for _ in range(ranks)]
    for number, size in sorted(sizes.items(), key=lambda one: (-one[1], one[0])):
        least = loads.index(min(loads))
        loads[least] += size + 1
        found[least].append(number)
    found = [sorted(numbers) for numbers in found]
    firsts = [len(numbers) * rank // ranks for rank, numbers in enumerate(found)]
    return [numbers[first:] + numbers[:first] for numbers, first in zip(found, firsts, strict=True)]


def _entries(folder: Path, numbers: Iterable[int]) -> dict[int, Entry]:
    found = {}
    for number in numbers:
        with contextlib.suppress(OSError, ValueError, Fault):
            found[number] = json_object.read(folder / f"{number}.json")
    return found
