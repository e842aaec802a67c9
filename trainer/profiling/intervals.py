"""Sets of moments: sorted pairs of start and end that neither meet nor overlap. Every function makes one of them."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Moments that are in any of these spans, which may come in any order and overlap."""
    found: Intervals = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def common(one: Intervals, other: Intervals) -> Intervals:
    """Moments that are in both."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Intervals, other: Intervals) -> Intervals:
    """Moments that are in the first alone."""
    found, j = [], 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if start < other[k][0]:
                found.append((start, other[k][0]))
            start = other[k][1]
            k += 1
        if start < end:
            found.append((start, end))
    return found
