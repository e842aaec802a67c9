"""Figures of a profiled step on one rank: what its device and its host did with the time.

    of(trace)             everything below, as JSON has it; milliseconds, unless the name says otherwise
    waiting(traces)       of each kind of collective, what ranks waited for those that came later

A moment counts as computing if any kernel ran that is no collective; a collective is exposed while nothing computes.
Shares are of the span. Exposed parts of several kinds and groups may overlap, so that they add up to more than their
union, which stands beside them.
"""

# pyright: reportArgumentType=false

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from trainer.profiling import gaps, intervals, kinds
from trainer.profiling.trace import Trace, Work

SMALL = 10.0  # microseconds: launching a kernel takes the host about as long
OPERATIONS = 15  # of the host, shown


def of(trace: Trace) -> dict[str, Any]:
    span = trace.end - trace.start
    computing = intervals.union(_spans(_computing(trace)))
    talking = intervals.union(_spans(_talking(trace)))
    busy = intervals.union(_spans(trace.work))
    exposed = intervals.without(talking, computing)
    found = {
        "rank": trace.rank,
        "steps": trace.steps,
        "span": _ms(span),
        "busy": _share(busy, span),
        "computing": _share(computing, span),
        "communication": _share(talking, span),
        "exposed": _share(exposed, span),
        "exposed_by": _exposed(trace, computing),
        "kernels": _kernels(trace, span),
        "small": _small(trace, span),
        "host": _host(trace),
        "operations": _operations(trace),
    }
    idle = gaps.found(trace, busy) if trace.work else []
    return found | {
        "idle": gaps.by_cause(idle, span),
        "gaps": gaps.costliest(trace, idle),
        "lead_us": _rounded(gaps.lead(trace)),
        "host_bound": gaps.host_bound(trace),
        "strip": gaps.strip(trace, computing, talking, idle),
    }


def waiting(traces: Iterable[Trace]) -> list[dict[str, Any]]:
    """Milliseconds of each kind and group's collectives, and how many of them were spent on waiting for other ranks.

    The n-th collective of a kind and group is the same on all its ranks; the rank on which it took least came last, and
    waited for nobody. A group that ranks have unlike numbers of is left out.
    """
    own: dict[tuple[str, str, str], list[list[Work]]] = defaultdict(list)
    for trace in traces:
        mine = defaultdict(list)
        for one in _talking(trace):
            mine[one.kind, one.group, one.ranks].append(one)
        for key, works in mine.items():
            own[key].append(works)
    total: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (kind, group, _), lists in own.items():
        if len(lists) < 2 or len({len(works) for works in lists}) > 1:
            continue
        for alike in zip(*lists, strict=True):
            took = [one.end - one.start for one in alike]
            total[kind, group][0] += sum(took)
            total[kind, group][1] += sum(took) - min(took) * len(took)
    rows = [
        {"kind": kind, "group": group, "ms": _ms(took), "waiting": _ms(late)}
        for (kind, group), (took, late) in total.items()
    ]
    return sorted(rows, key=lambda row: -row["waiting"])


def _computing(trace: Trace) -> list[Work]:
    return [one for one in trace.work if one.kind not in kinds.COLLECTIVES | kinds.COPIES]


def _talking(trace: Trace) -> list[Work]:
    return [one for one in trace.work if one.kind in kinds.COLLECTIVES]


def _exposed(trace: Trace, computing: intervals.Intervals) -> list[dict[str, Any]]:
    by: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for one in _talking(trace):
        by[one.kind, one.group].append(one)
    rows = []
    for (kind, group), works in by.items():
        whole = intervals.union(_spans(works))
        rows.append(
            {
                "kind": kind,
                "group": group,
                "count": len(works),
                "ms": _ms(intervals.length(whole)),
                "exposed": _ms(intervals.length(intervals.without(whole, computing))),
                "megabytes": round(sum(one.size for one in works) / 1e6, 1),
            }
        )
    return sorted(rows, key=lambda row: -row["exposed"])


def _kernels(trace: Trace, span: float) -> list[dict[str, Any]]:
    count, took = Counter(), Counter()
    for one in trace.work:
        count[one.kind] += 1
        took[one.kind] += one.end - one.start
    return [
        {"kind": kind, "count": count[kind], "ms": _ms(time), "share": round(time / span, 4)}
        for kind, time in took.most_common()
    ]


def _small(trace: Trace, span: float) -> dict[str, Any]:
    took = [one.end - one.start for one in _computing(trace)]
    small = [time for time in took if time < SMALL]
    return {"count": len(small), "of": len(took), "ms": _ms(sum(small)), "share": round(sum(small) / span, 4)}


def _host(trace: Trace) -> dict[str, Any]:
    starts = [call for call in trace.calls if kinds.STARTS.search(call.name)]
    waits = [call for call in trace.calls if kinds.WAITS.search(call.name)]
    span = trace.end - trace.start
    waited = intervals.union((call.start, call.end) for call in waits)
    working = span - intervals.length(waited)
    return {
        "launches": len(starts),
        "collectives": len(_talking(trace)),
        "waits": len(waits),
        "waiting": _ms(intervals.length(waited)),
        "us_per_launch": _rounded(working / len(starts)) if starts else None,
    }


def _operations(trace: Trace) -> list[dict[str, Any]]:
    """What took most of the host's time by itself, without what it was made of, over all threads."""
    count, took = Counter(one.name for one in trace.operations), Counter()
    by = defaultdict(list)
    for one in trace.operations:
        by[one.thread].append(one)
    for events in by.values():
        took.update(gaps.doing(events, trace.start, trace.end))
    del took[gaps.OUTSIDE]
    return [{"name": name, "count": count[name], "ms": _ms(time)} for name, time in took.most_common(OPERATIONS)]


def _spans(works: Iterable[Work]) -> Iterable[tuple[float, float]]:
    return ((one.start, one.end) for one in works)


def _share(found: intervals.Intervals, span: float) -> float:
    return round(intervals.length(found) / span, 4)


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
