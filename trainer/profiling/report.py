"""Report on the traces of a folder: figures of every rank as JSON, as text, and as a page with a picture.

    report(folder, of)     reads <folder>/rank*.trace.json.gz, writes profile.json and profile.html there
    lines(answer)          for a terminal

`of` has the caller's facts of the steps: their usual seconds, and layers times microbatches of a rank.
"""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from contract import html_page
from contract.faults import Fault
from contract.html_page import Gap, Strip
from trainer.profiling import figures, gaps, trace

TRACE = "rank{}.trace.json.gz"
RESULT, PAGE = "profile.json", "profile.html"
DISTORTED = 1.25  # above this ratio to a usual step, a profiled step shows little about idle time
SHOWN = 12  # rows of a table


def report(folder: Path, of: dict[str, Any] | None = None) -> dict[str, Any]:
    files = sorted(folder.glob(TRACE.format("*")), key=lambda file: int(file.name.split(".")[0][4:]))
    if not files:
        raise Fault(f"{folder}: no {TRACE.format('N')}: nothing was profiled")
    collectives, rows = [], []
    for file in files:
        of_rank = trace.read(file)
        rows.append({**figures.of(of_rank), "trace": str(file.absolute())})
        collectives.append(of_rank.collectives)  # the rest of a trace may take a gigabyte
    answer = {**(of or {}), "ranks": rows, "waiting": figures.waiting(collectives)}
    if usual := answer.get("seconds"):
        answer["slowed"] = round(max(row["span"] / row["steps"] for row in rows) / 1e3 / usual, 3)
    answer |= {"json": str(folder / RESULT), "page": str(folder / PAGE)}
    (folder / RESULT).write_text(json.dumps(answer))
    (folder / PAGE).write_text(_page(answer))
    return answer


def _page(answer: dict[str, Any]) -> str:
    """A strip for each rank shows how its device spent the time, with the costliest gaps above it."""
    parts = [html_page.strip_legend(), "<p>The rest are copies, fills and gaps below 2 us.</p>"]
    for row in answer["ranks"]:
        name, shares = f"rank {row['rank']}", f"{row['computing']:.1%} computing, {row['busy']:.1%} busy"
        parts.append(f"<p>{name}: {row['span']:,.1f} ms, {shares}</p>")
        parts.append(html_page.strips([Strip(name, row["strip"], [_mark(gap, row["span"]) for gap in row["gaps"]])]))
    parts += ["<h2>Report</h2>", f"<pre>{escape(chr(10).join(lines(answer)))}</pre>"]
    return html_page.page(f"Profile of {answer.get('name', 'a training')}", parts)


def _mark(gap: dict[str, Any], span: float) -> Gap:
    host = ", ".join(f"{name} {took}" for name, took in gap["host"])
    return Gap(gap["at"] / span, gap["ms"] / span, f"{gap['ms']:.3f} ms, {gap['cause']}: {host}")


def lines(answer: dict[str, Any]) -> Iterator[str]:
    ranks = answer["ranks"]
    slowest = min(ranks, key=lambda row: row["computing"])
    yield verdict(answer, slowest)
    if slowest["kernels"]:
        yield from _shares(ranks)
        yield f"rank {slowest['rank']}, which computes least; ms of a profiled step"
        yield from _device(answer, slowest)
    else:
        yield f"rank {slowest['rank']}: no kernels without a GPU: operations of the host only"
    yield from _table("operations of the host", slowest["operations"], ("name", "count", "ms"))
    for row in ranks[:1] + ranks[1:][-1:]:
        yield f"trace of rank {row['rank']}, for https://ui.perfetto.dev: {row['trace']}"
    yield f"page: {answer['page']}"


def verdict(answer: dict[str, Any], row: dict[str, Any]) -> str:
    """One line on what limits the speed."""
    if not row["kernels"]:
        return f"profile: {row['span']:,.0f} ms; no kernels were recorded"
    idle, host = row["idle"], row["host"]
    late = idle[gaps.LATE]["share"] + idle[gaps.WAITED]["share"]
    losses = {"host-bound": late, "bound by communication": row["exposed"]}
    worst, share = max(losses.items(), key=lambda loss: loss[1])
    limit = worst if row["computing"] < 0.85 and share >= 0.05 else "GPU-bound"
    line = (
        f"profile: {limit}: {row['computing']:.0%} computing, {1 - row['busy']:.0%} idle "
        f"({late:.0%} because the host is late), {row['exposed']:.0%} exposed communication"
    )
    each = answer.get("layers_times_microbatches")
    per = f" per layer and microbatch of {each * row['steps']:.0f}" if each else ""
    by = each * row["steps"] if each else 1
    counts = [sum(kind["count"] for kind in row["kernels"]), host["collectives"], host["waits"]]
    line += "; {:,.4g} kernels, {:,.4g} collectives, {:,.4g} waits".format(*(count / by for count in counts)) + per
    if answer.get("slowed", 0) > DISTORTED:
        line += f"; the profiler made the step {answer['slowed']:.2f} times as long: idle times are too large"
    return line


def _shares(ranks: list[dict[str, Any]]) -> Iterator[str]:
    yield "shares of the step            least    most"
    for key in ("busy", "computing", "communication", "exposed"):
        values = [row[key] for row in ranks]
        yield f"    {key:20} {min(values):10.3f} {max(values):7.3f}"
    for cause in (gaps.LATE, gaps.WAITED, gaps.DEPENDS, gaps.SHORT):
        values = [row["idle"][cause]["share"] for row in ranks]
        yield f"    idle, {cause:14} {min(values):10.3f} {max(values):7.3f}"


def _device(answer: dict[str, Any], row: dict[str, Any]) -> Iterator[str]:
    host, bound, small = row["host"], row["host_bound"], row["small"]
    yield (
        f"    the host is {row['lead_us']} us ahead in the middle; {host['launches']} calls of {host['us_per_launch']} "
        f"us, {host['waits']} waits of {host['waiting']} ms; {small['count']} of {small['of']} kernels below "
        f"{figures.SMALL:.0f} us"
    )
    yield from _table("kernels", row["kernels"], ("kind", "count", "ms", "share"))
    yield from _table("communication", row["exposed_by"], ("kind", "group", "count", "ms", "exposed", "megabytes"))
    yield from _table("waiting for other ranks, all ranks", answer["waiting"], ("kind", "group", "ms", "waiting"))
    if bound["count"]:
        yield f"host-bound stretches: {bound['count']}, {bound['share']:.1%} of the step; the longest"
        for stretch in bound["longest"]:
            span = f"at {stretch['at']:.2f} ms, {stretch['ms']:.2f} ms"
            yield f"    {span}, {stretch['kernels']} kernels: {_doing(stretch['host'])}"
    yield "costliest gaps"
    for gap in row["gaps"]:
        before, after = ((gap[key] or "-")[:40] for key in ("before", "after"))
        yield f"    at {gap['at']:.2f} ms, {gap['ms']:.3f} ms, {gap['cause']}: {_doing(gap['host'])}"
        yield f"        between {before} and {after}"


def _doing(host: list[list[Any]]) -> str:
    return ", ".join(f"{name[:60]} {took:.3f}" for name, took in host) or "no recorded operation"


def _table(head: str, rows: list[dict[str, Any]], keys: tuple[str, ...]) -> Iterator[str]:
    if not rows:
        return
    cells = [keys, *([_cell(row[key]) for key in keys] for row in rows[:SHOWN])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(keys))]
    yield head
    for row in cells:
        named = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "    " + "  ".join(named)


def _cell(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)[:70]
