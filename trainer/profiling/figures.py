"""Figures of a profiled step on one rank: how its device and its host spent the time.

    of(trace)             all figures, for JSON; in milliseconds, unless the name says otherwise
    waiting(traces)       for each kind of collective, the time for which ranks waited for later ones

The device is computing while any kernel runs that is not a collective; a collective is exposed while nothing computes.
Shares are of the span. Exposed parts of several kinds and groups may overlap: their sum may exceed the figure
`exposed`, which is their union.
"""

# pyright: reportArgumentType=false

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from trainer.profiling import gaps, intervals
from trainer.profiling.trace import COLLECTIVES, COPIES, STARTS, Trace, Work

SMALL = 10.0  # microseconds; the host needs about this time to launch a kernel
OPERATIONS = 15  # number of the host's operations that are shown


def of(trace: Trace) -> dict[str, Any]:
    computing = intervals.union(_spans(_computing(trace)))
    talking = intervals.union(_spans(trace.collectives))
    busy = intervals.union(_spans(trace.work))
    idle = gaps.find(trace, busy) if trace.work else []
    return {
        "rank": trace.rank,
        "steps": trace.steps,
        "span": _ms(trace.span),
        "busy": _share(busy, trace),
        "computing": _share(computing, trace),
        "communication": _share(talking, trace),
        "exposed": _share(intervals.without(talking, computing), trace),
        "exposed_by": _exposed(trace, computing),
        "kernels": _kernels(trace),
        "small": _small(trace),
        "host": _host(trace),
        "operations": _operations(trace),
        "idle": gaps.by_cause(idle, trace.span),
        "gaps": gaps.costliest(trace, idle),
        "lead_us": gaps.lead(trace),
        "host_bound": gaps.host_bound(trace),
        "strip": gaps.strip(trace, computing, talking, idle),
    }


def waiting(collectives: Iterable[list[Work]]) -> list[dict[str, Any]]:
    """Return the milliseconds of the collectives of each kind and group, and how many of them are waiting for ranks.

    The n-th collective of a kind and group is the same on all its ranks. The rank on which it was shortest arrived last
    and did not wait. A group with different numbers of collectives on its ranks is left out.
    """
    by_group: dict[tuple[str, str, str], list[list[Work]]] = defaultdict(list)
    for works in collectives:
        of_rank = defaultdict(list)
        for work in works:
            of_rank[work.kind, work.group, work.ranks].append(work)
        for key, of_group in of_rank.items():
            by_group[key].append(of_group)
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (kind, group, _), lists in by_group.items():
        if len(lists) < 2 or len({len(works) for works in lists}) > 1:
            continue
        for collective in zip(*lists, strict=True):
            took = [work.end - work.start for work in collective]
            total[kind, group][0] += sum(took)
            total[kind, group][1] += sum(took) - min(took) * len(took)
    rows = [
        {"kind": kind, "group": group, "ms": _ms(took), "waiting": _ms(late)}
        for (kind, group), (took, late) in total.items()
    ]
    return sorted(rows, key=lambda row: -row["waiting"])


def _computing(trace: Trace) -> list[Work]:
    return [work for work in trace.work if work.kind not in COLLECTIVES | COPIES]


def _exposed(trace: Trace, computing: intervals.Intervals) -> list[dict[str, Any]]:
    by: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for work in trace.collectives:
        by[work.kind, work.group].append(work)
    rows = []
    for (kind, group), works in by.items():
        whole = intervals.union(_spans(works))
        exposed = intervals.length(intervals.without(whole, computing))
        row = {"kind": kind, "group": group, "count": len(works), "ms": _ms(intervals.length(whole))}
        row |= {"exposed": _ms(exposed), "megabytes": round(sum(work.size for work in works) / 1e6, 1)}
        rows.append(row)
    return sorted(rows, key=lambda row: -row["exposed"])


def _kernels(trace: Trace) -> list[dict[str, Any]]:
    count, took = Counter(work.kind for work in trace.work), Counter()
    for work in trace.work:
        took[work.kind] += work.end - work.start
    return [
        {"kind": kind, "count": count[kind], "ms": _ms(time), "share": round(time / trace.span, 4)}
        for kind, time in took.most_common()
    ]


def _small(trace: Trace) -> dict[str, Any]:
    took = [work.end - work.start for work in _computing(trace)]
    small = [time for time in took if time < SMALL]
    return {"count": len(small), "of": len(took), "ms": _ms(sum(small)), "share": round(sum(small) / trace.span, 4)}


def _host(trace: Trace) -> dict[str, Any]:
    waited = intervals.length(intervals.union((call.start, call.end) for call in trace.waits))
    launches = sum(1 for call in trace.calls if STARTS.search(call.name))
    return {
        "launches": launches,
        "collectives": len(trace.collectives),
        "waits": len(trace.waits),
        "waiting": _ms(waited),
        "us_per_launch": round((trace.span - waited) / launches, 2) if launches else None,
    }


def _operations(trace: Trace) -> list[dict[str, Any]]:
    """Return the operations that took most of the host's time, over all threads, without operations inside them."""
    count, took = Counter(event.name for event in trace.operations), Counter()
    by = defaultdict(list)
    for event in trace.operations:
        by[event.thread].append(event)
    for events in by.values():
        took.update(gaps.doing(events, trace.start, trace.end))
    del took[gaps.OUTSIDE]
    return [{"name": name, "count": count[name], "ms": _ms(time)} for name, time in took.most_common(OPERATIONS)]


def _spans(works: Iterable[Work]) -> Iterable[tuple[float, float]]:
    return ((work.start, work.end) for work in works)


def _share(spans: intervals.Intervals, trace: Trace) -> float:
    return round(intervals.length(spans) / trace.span, 4)


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 4)
