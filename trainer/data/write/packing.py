"""Packing of rows into sequences: best fit in decreasing order of length, which leaves the least unused room.

Rows are placed by length, not one by one: all rows of a length go into the packs with the smallest sufficient room, and
packs with the same history stay one range of numbers. The work grows with the number of distinct lengths; 5 million
rows take 1.3 s and 300 MB. Rows of equal length are interchangeable, so the rows of a pack, and the order of the packs,
are drawn with the seed.

Not covered: rows longer than a pack (dropped or cut before), and keeping rows in order.
"""

from bisect import bisect_left, insort

import numpy as np

from conf.rules.layout import packing_multiple
from conf.schema.run import Run
from contract.faults import Fault


def multiple(run: Run) -> int:
    """Return the number that divides the length of every packed row, and of the sequence."""
    divisor, length = packing_multiple(run.layout), run.data.seq_length
    if run.data.packed and length % divisor:
        nearest = [divisor * part for part in (length // divisor, length // divisor + 1) if part]
        raise Fault(
            f"data.seq_length: {length} is not a multiple of {divisor}, which this layout needs for packed "
            f"rows; nearest: {', '.join(map(str, nearest))}"
        )
    return divisor


def padded(lengths: np.ndarray, pad_to: int) -> np.ndarray:
    """Return the tokens that rows take in a pack: without the last token, which is only a label, and rounded up."""
    return -(-(lengths - 1) // pad_to) * pad_to


def assign(lengths: np.ndarray, capacity: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign rows to packs: pack i has the rows order[bounds[i]:bounds[i + 1]], together at most `capacity` tokens."""
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
    """Return the pack of every row, rows in decreasing order of length; and the number of packs."""
    placed: list[np.ndarray] = []
    rooms: list[int] = []  # sorted: free room of packs that are not full
    packs: dict[int, list[range]] = {}  # by that room
    count = 0

    def leave(range_of_packs: range, room: int) -> None:
        if room and range_of_packs:
            if room not in packs:
                insort(rooms, room)
                packs[room] = []
            packs[room].append(range_of_packs)

    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms[at]
                range_of_packs = packs[room].pop()
                if not packs[room]:
                    del packs[room], rooms[at]
            else:
                room, range_of_packs = capacity, range(count, count + -(-left // (capacity // length)))
                count = range_of_packs.stop
            each = room // length  # a pack that got a row is the best fit for the next while it has room
            full, rest = range_of_packs[: left // each], range_of_packs[left // each :]
            placed.append(np.repeat(np.arange(full.start, full.stop, dtype=np.int32), each))
            leave(full, room - each * length)
            left -= each * len(full)
            if rest and left:  # fewer than `each`
                placed.append(np.full(left, rest.start, np.int32))
                leave(rest[:1], room - left * length)
                rest, left = rest[1:], 0
            leave(rest, room)
    return np.concatenate(placed), count
