"""Gaps in which a device does nothing, and their causes: a late host, a host that waits, or work that waits.

The work that ends a gap shows its cause. If its call had not returned when the gap began, the host was late; if the
calling thread was in a call that waits for the device, the host was late because of that. If the call had returned
before the gap, the work waited for something else: another stream, or the device.
"""

# pyright: reportArgumentType=false

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from trainer.profiling import intervals
from trainer.profiling.trace import COLLECTIVES, Call, Trace, Work

LATE, WAITED, DEPENDS, SHORT = "host late", "after a wait", "dependency", "below 2 us"
LEAST = 2.0  # microseconds that are always between two kernels of a stream
LEAD = 20.0  # microseconds from a call's return to the start of its work; with less, the host is barely in time
RUN = 10  # least number of consecutive works with a lead below LEAD in a stretch; fewer may be chance
MOST = 10  # gaps that are shown
STRETCHES = 5  # stretches that are shown
NAMED = 4  # operations of the host that are named for each
COLUMNS = 600  # of the picture
OUTSIDE = "Python, outside of torch"


@dataclass(frozen=True)
class Gap:
    start: float
    end: float
    cause: str
    before: Work | None
    after: Work | None
    call: Call | None  # that started the work after the gap


def find(trace: Trace, busy: intervals.Intervals) -> list[Gap]:
    """Find the gaps between the device's works, including those at both ends of the steps."""
    first = {work.start: work for work in reversed(trace.work)}  # of works that start together, the first in the list
    last = {work.end: work for work in trace.work}
    gaps = []
    for start, end in intervals.without([(trace.start, trace.end)], busy):
        after = first.get(end)
        call = trace.starts.get(after.correlation) if after else None
        gaps.append(Gap(start, end, _cause(start, end, after, call, trace.waits), last.get(start), after, call))
    return gaps


def _cause(start: float, end: float, after: Work | None, call: Call | None, waits: list[Call]) -> str:
    if after is None:  # the end of the step
        return LATE
    if end - start < LEAST:
        return SHORT
    if call is None or call.end <= start:
        return DEPENDS
    at = bisect_right(waits, start, key=lambda wait: wait.end)
    nearby = waits[at : at + 8]  # the first that ended after the gap began, of all threads
    return WAITED if any(wait.thread == call.thread and wait.start < end for wait in nearby) else LATE


def by_cause(gaps: Iterable[Gap], span: float) -> dict[str, dict[str, Any]]:
    rows = {cause: {"count": 0, "ms": 0.0, "share": 0.0} for cause in (LATE, WAITED, DEPENDS, SHORT)}
    for gap in gaps:
        row, took = rows[gap.cause], gap.end - gap.start
        row["count"] += 1
        row["ms"] += took / 1e3
        row["share"] += took / span
    return {cause: {key: round(value, 4) for key, value in row.items()} for cause, row in rows.items()}


def costliest(trace: Trace, gaps: list[Gap]) -> list[dict[str, Any]]:
    """Return the longest gaps, each with the operations of the thread that ended it."""
    longest = sorted(gaps, key=lambda gap: gap.start - gap.end)[:MOST]
    events = _by_thread(trace)
    rows = []
    for gap in longest:
        thread = gap.call.thread if gap.call else _main(trace)
        before, after = (work.name if work else None for work in (gap.before, gap.after))
        row = _row(trace, events.get(thread, []), gap.start, gap.end)
        rows.append(row | {"cause": gap.cause, "before": before, "after": after})
    return rows


def _row(trace: Trace, events: list[Call], start: float, end: float) -> dict[str, Any]:
    """Place and length in milliseconds, and the operations of the host that took most of this time."""
    host = [[name, round(took / 1e3, 4)] for name, took in doing(events, start, end).most_common(NAMED)]
    return {"at": round((start - trace.start) / 1e3, 4), "ms": round((end - start) / 1e3, 4), "host": host}


def lead(trace: Trace) -> float | None:
    """Median of the microseconds by which the host is ahead of the device; None if no call is known."""
    ahead = [max(0.0, work.start - call.end) for work, call in _works_with_calls(trace)]
    return round(median(ahead), 2) if ahead else None


def host_bound(trace: Trace) -> dict[str, Any]:
    """Stretches of time in which each kernel started right after its call: the host sets the pace there."""
    stretches, run = [], []
    for work, call in [*_works_with_calls(trace), (None, None)]:
        if work and call and work.start - call.end < LEAD:
            run.append(work)
            continue
        if len(run) >= RUN:
            stretches.append((run[0].start, max(work.end for work in run), len(run)))
        run = []
    whole = intervals.union((start, end) for start, end, _ in stretches)
    events = _by_thread(trace).get(_main(trace), [])
    longest = sorted(stretches, key=lambda stretch: stretch[0] - stretch[1])[:STRETCHES]
    rows = [_row(trace, events, start, end) | {"kernels": count} for start, end, count in longest]
    return {"count": len(stretches), "share": round(intervals.length(whole) / trace.span, 4), "longest": rows}


def doing(events: list[Call], start: float, end: float) -> Counter:
    """Microseconds of one thread between two moments, by the innermost event at each moment.

    Events are nested or consecutive, and sorted by start, outer events first.
    """
    took, stack, now = Counter(), [], start

    def until(moment: float) -> None:
        nonlocal now
        if (moment := min(moment, end)) > now:
            took[stack[-1].name if stack else OUTSIDE] += moment - now
            now = moment

    for event in events[: bisect_right(events, end, key=lambda event: event.start)]:
        if event.end <= start:
            continue
        while stack and stack[-1].end <= event.start:
            until(stack[-1].end)
            stack.pop()
        until(event.start)
        stack.append(event)
    while stack:
        until(stack[-1].end)
        stack.pop()
    until(end)
    return took


def strip(
    trace: Trace, computing: intervals.Intervals, talking: intervals.Intervals, gaps: list[Gap]
) -> dict[str, list[float]]:
    """Shares of each of COLUMNS equal parts of the time, for a picture. With copies and fills they add up to 1."""
    rows = {
        "computing": computing,
        "exposed": intervals.without(talking, computing),
        **{cause: [(gap.start, gap.end) for gap in gaps if gap.cause == cause] for cause in (LATE, WAITED, DEPENDS)},
    }
    return {name: _columns(spans, trace) for name, spans in rows.items()}


def _columns(spans: intervals.Intervals, trace: Trace) -> list[float]:
    """Shares of each column that these spans fill, from the time that they fill up to each column's edges."""
    moments, filled = [0.0], [0.0]
    for start, end in spans:
        moments += [start - trace.start, end - trace.start]
        filled += [filled[-1], filled[-1] + end - start]
    up_to_edges = np.interp(np.linspace(0, trace.span, COLUMNS + 1), moments, filled)
    return (np.diff(up_to_edges) * COLUMNS / trace.span).round(3).tolist()


def _by_thread(trace: Trace) -> dict[str, list[Call]]:
    threads: dict[str, list[Call]] = {}
    for event in sorted([*trace.operations, *trace.calls], key=lambda event: (event.start, -event.end)):
        threads.setdefault(event.thread, []).append(event)
    return threads


def _main(trace: Trace) -> str:
    """Return the thread with the most calls."""
    counts = Counter(call.thread for call in trace.calls or trace.operations)
    return counts.most_common(1)[0][0] if counts else ""


def _works_with_calls(trace: Trace) -> Iterator[tuple[Work, Call]]:
    """Works with the calls that started them, by start. Collectives are left out, because they wait for other ranks."""
    for work in trace.work:
        if work.kind not in COLLECTIVES and (call := trace.starts.get(work.correlation)):
            yield work, call
