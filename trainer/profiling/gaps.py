"""Moments at which a device does nothing, and why: its host is late, waits for it, or the device waits for itself.

A gap's cause is told by the work that ends it. Had its call not returned when the gap began, the host was late; and if
the thread that called was in a call that waits for the device, it was late because of that. Work that had been asked
for before the gap waited for something else: another stream, or the device itself.
"""

# pyright: reportArgumentType=false

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainer.profiling import intervals, kinds
from trainer.profiling.trace import Call, Trace, Work

LATE, WAITED, DEPENDS, SHORT = "host late", "after a wait", "dependency", "below 2 us"
LEAST = 2.0  # microseconds that lie between two kernels of one stream in any case
LEAD = 20.0  # microseconds between a call's return and its work's begin, below which the host is only just in time
RUN = 10  # works in a row that begin so: fewer are chance
MOST = 10  # gaps that are shown
STRETCHES = 5  # and stretches
TOLD = 4  # operations of the host that are named for each
COLUMNS = 600  # of the picture
OUTSIDE = "Python, outside of torch"


@dataclass(frozen=True)
class Gap:
    start: float
    end: float
    cause: str
    before: Work | None
    after: Work | None
    call: Call | None  # that asked for the work that ended it


def found(trace: Trace, busy: intervals.Intervals) -> list[Gap]:
    """Gaps between what the device did, those at both ends of the steps included."""
    calls = {call.correlation: call for call in trace.calls if kinds.STARTS.search(call.name)}
    waits = sorted((call for call in trace.calls if kinds.WAITS.search(call.name)), key=lambda call: call.end)
    first = {one.start: one for one in reversed(trace.work)}  # of those that begin together the longest-named
    last = {one.end: one for one in trace.work}
    made = []
    for start, end in intervals.without([(trace.start, trace.end)], busy):
        after = first.get(end)
        call = calls.get(after.correlation) if after else None
        made.append(Gap(start, end, _cause(start, end, after, call, waits), last.get(start), after, call))
    return made


def _cause(start: float, end: float, after: Work | None, call: Call | None, waits: list[Call]) -> str:
    if after is None:  # the end of the step
        return LATE
    if end - start < LEAST:
        return SHORT
    if call is None or call.end <= start:
        return DEPENDS
    at = bisect_right(waits, start, key=lambda one: one.end)
    nearby = waits[at : at + 8]  # those of a few threads that ended after the gap began
    return WAITED if any(one.thread == call.thread and one.start < end for one in nearby) else LATE


def by_cause(gaps: Iterable[Gap], span: float) -> dict[str, dict[str, Any]]:
    rows = {cause: {"count": 0, "ms": 0.0, "share": 0.0} for cause in (LATE, WAITED, DEPENDS, SHORT)}
    for gap in gaps:
        row, took = rows[gap.cause], gap.end - gap.start
        row["count"] += 1
        row["ms"] += took / 1e3
        row["share"] += took / span
    return {cause: {key: round(value, 4) for key, value in row.items()} for cause, row in rows.items()}


def costliest(trace: Trace, gaps: list[Gap]) -> list[dict[str, Any]]:
    """The longest gaps, and what the thread that ended each did meanwhile."""
    longest = sorted(gaps, key=lambda gap: gap.start - gap.end)[:MOST]
    events = _by_thread(trace)
    rows = []
    for gap in longest:
        thread = gap.call.thread if gap.call else _main(trace)
        during = doing(events.get(thread, []), gap.start, gap.end)
        rows.append(
            {
                "at": round((gap.start - trace.start) / 1e3, 4),
                "ms": round((gap.end - gap.start) / 1e3, 4),
                "cause": gap.cause,
                "before": gap.before.name if gap.before else None,
                "after": gap.after.name if gap.after else None,
                "host": _told(during),
            }
        )
    return rows


def lead(trace: Trace) -> float | None:
    """Median of the microseconds by which the host is ahead of the device; None where no call is known."""
    ahead = [max(0.0, one.start - call.end) for one, call in _asked(trace)]
    return median(ahead) if ahead else None


def host_bound(trace: Trace) -> dict[str, Any]:
    """Stretches of time in which each kernel began as soon as it was asked for: the host sets the pace there."""
    stretches, run = [], []
    for one, call in [*_asked(trace), (None, None)]:
        if one and call and one.start - call.end < LEAD:
            run.append(one)
            continue
        if len(run) >= RUN:
            stretches.append((run[0].start, max(work.end for work in run), len(run)))
        run = []
    whole = intervals.union((start, end) for start, end, _ in stretches)
    events = _by_thread(trace).get(_main(trace), [])
    rows = []
    for start, end, count in sorted(stretches, key=lambda one: one[0] - one[1])[:STRETCHES]:
        row = {"at": round((start - trace.start) / 1e3, 4), "ms": round((end - start) / 1e3, 4), "kernels": count}
        rows.append(row | {"host": _told(doing(events, start, end))})
    share = round(intervals.length(whole) / (trace.end - trace.start), 4)
    return {"count": len(stretches), "share": share, "longest": rows}


def doing(events: list[Call], start: float, end: float) -> Counter:
    """Microseconds of one thread between two moments, by the innermost of what it was in.

    The events lie in or after one another, and come by their start, outer ones first.
    """
    took, stack, now = Counter(), [], start

    def until(moment: float) -> None:
        nonlocal now
        if (moment := min(moment, end)) > now:
            took[stack[-1].name if stack else OUTSIDE] += moment - now
            now = moment

    for event in _overlapping(events, start, end):
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
    """Shares of each of COLUMNS equal parts of the time, for a picture: what adds up to 1 with copies and fills."""
    rows = {
        "computing": computing,
        "exposed": intervals.without(talking, computing),
        **{cause: [(gap.start, gap.end) for gap in gaps if gap.cause == cause] for cause in (LATE, WAITED, DEPENDS)},
    }
    return {name: list(_columns(spans, trace)) for name, spans in rows.items()}


def _columns(spans: intervals.Intervals, trace: Trace) -> Iterator[float]:
    width, at = (trace.end - trace.start) / COLUMNS, 0
    for column in range(COLUMNS):
        left, right = trace.start + column * width, trace.start + (column + 1) * width
        while at < len(spans) and spans[at][1] <= left:
            at += 1
        inside, next_one = 0.0, at
        while next_one < len(spans) and spans[next_one][0] < right:
            inside += min(right, spans[next_one][1]) - max(left, spans[next_one][0])
            next_one += 1
        yield round(inside / width, 3)


def _overlapping(events: list[Call], start: float, end: float) -> Iterator[Call]:
    """Events of one thread that touch the time between; those that began long before are found by their end."""
    last = bisect_right(events, end, key=lambda one: one.start)
    return (event for event in events[:last] if event.end > start)


def _by_thread(trace: Trace) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for one in sorted([*trace.operations, *trace.calls], key=lambda one: (one.start, -one.end)):
        found.setdefault(one.thread, []).append(one)
    return found


def _main(trace: Trace) -> str:
    """The thread that asks for most."""
    counts = Counter(call.thread for call in trace.calls) or Counter(one.thread for one in trace.operations)
    return counts.most_common(1)[0][0] if counts else ""


def _asked(trace: Trace) -> Iterator[tuple[Work, Call]]:
    """Kernels with the calls that asked for them, by start. Collectives begin when others are there: left out."""
    calls = {call.correlation: call for call in trace.calls if kinds.STARTS.search(call.name)}
    for one in trace.work:
        if one.kind not in kinds.COLLECTIVES and (call := calls.get(one.correlation)):
            yield one, call


def _told(during: Counter) -> list[list[Any]]:
    return [[name, round(took / 1e3, 4)] for name, took in during.most_common(TOLD)]
