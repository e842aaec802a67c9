"""Sets of moments: sorted pairs of start and end that neither touch nor overlap."""

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
    """Moments that are in any of these spans, which may overlap and need not be sorted."""
    result: Intervals = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def without(a: Intervals, b: Intervals) -> Intervals:
    """Moments that are in `a` but not in `b`."""
    result, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if start < b[k][0]:
                result.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            result.append((start, end))
    return result
