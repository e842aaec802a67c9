"""Packing of rows into sequences: best fit in decreasing order of length, which leaves the least room unused.

Rows are placed a length at a time, not one by one: all rows of a length go into the packs with the smallest room that
holds them, and packs that have been treated alike so far stay one range of numbers. The work grows with the number of
distinct lengths; 5 million rows take 1.3 s and 300 MB. Rows of equal length are interchangeable to it, so that which
rows share a pack, and the order of the packs, are drawn with the seed.

Not covered: rows longer than a pack (they have been dropped or cut before), and keeping rows in their order.
"""

from bisect import bisect_left, insort

import numpy as np

from conf.rules.layout import packing_multiple
from conf.schema.run import Run
from contract.faults import Fault


def multiple(run: Run) -> int:
    """The number that divides the length of every packed row, and of the sequence."""
    found, length = packing_multiple(run.layout), run.data.seq_length
    if run.data.packed and length % found:
        near = [found * part for part in (length // found, length // found + 1) if part]
        raise Fault(
            f"data.seq_length: {length} is no multiple of {found}, as the length of packed rows has to be at this "
            f"layout; nearest: {', '.join(map(str, near))}"
        )
    return found


def padded(lengths: np.ndarray, pad_to: int) -> np.ndarray:
    """Tokens that rows of these lengths count against a pack: one less, as the last is only a label, rounded up."""
    return -(-(lengths - 1) // pad_to) * pad_to


def assign(lengths: np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign rows to packs: pack i holds the rows order[bounds[i]:bounds[i + 1]], of `capacity` together at most."""
    if not len(lengths):
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    shortest, longest = int(lengths.min()), int(lengths.max())
    assert 0 < shortest <= longest <= capacity, (shortest, longest, capacity)
    random = np.random.Generator(np.random.PCG64(seed))
    rows = random.permutation(len(lengths)).astype(np.int32)
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    packs, count = _place(np.bincount(lengths), capacity)
    packs = random.permutation(count).astype(np.int32)[packs]
    order = rows[np.argsort(packs, kind="stable")]
    return order, np.concatenate([[0], np.cumsum(np.bincount(packs, minlength=count))])


def _place(histogram: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack of every row, rows in decreasing order of length; and the number of packs."""
    placed: list[np.ndarray] = []
    rooms: list[int] = []  # sorted: room left in the packs that are not full
    packs: dict[int, list[range]] = {}  # by that room
    count = 0

    def leave(found: range, room: int) -> None:
        if room and found:
            if room not in packs:
                insort(rooms, room)
                packs[room] = []
            packs[room].append(found)

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                found = packs[room].pop()
                if not packs[room]:
                    del packs[room], rooms[at]
            else:
                room, found = capacity, range(count, count + -(-left // (capacity // length)))
                count = found.stop
            each = room // length  # a pack that has taken one is the best fit for the next, while it has room
            full, rest = found[: left // each], found[left // each :]
            placed.append(np.repeat(np.arange(full.start, full.stop, dtype=np.int32), each))
            leave(full, room - each * length)
            left -= each * len(full)
            if rest and left:  # fewer than `each`
                placed.append(np.full(left, rest.start, np.int32))
                leave(rest[:1], room - left * length)
                rest, left = rest[1:], 0
            leave(rest, room)
    return np.concatenate(placed), count
