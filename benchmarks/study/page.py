"""Report of a study as one HTML page that needs no server and no network. page.html.j2 has the text."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Template
from markupsafe import Markup

from benchmarks.study import figures, pictures
from benchmarks.study.pictures import Bar
from contract import html_page
from contract.html_page import Strip

SHOWN, OTHERS = 12, "other operations"  # operations of a host that have their own name and colour
WHOLE = "a step"
SPENT = {"computing": "#2e7d32", "exposed communication": "#c62828", "idle": "#b0bec5", "copies and fills": "#f9a825"}
SPENT |= {WHOLE: "#1b5e9e"}
WORDS = Path(__file__).with_suffix(".html.j2")

Row = dict[str, Any]  # title, configuration, overrides, documented_ms, and figures or failed


def of(report: dict[str, Any], folder: Path) -> str:
    measured = [row for row in report["rows"] if "failed" not in row["figures"]]
    profiled = [row for row in measured if "time" in row["figures"]]
    on_device = [row for row in profiled if row["figures"]["time"]["kinds"]]
    parts = {
        "table": _table(report["rows"]),
        "times": pictures.bars([_time_bar(row) for row in measured], "ms", SPENT),
        "memory": pictures.bars(list(_memory_bars(measured)), "GB"),
        "kernels": pictures.bars([_kernel_bar(row) for row in on_device], "ms"),
        "operations": pictures.bars(list(_host_bars(profiled)), "ms"),
        "strip_legend": html_page.strip_legend(),
        "losses": pictures.curves([(row["title"], row["figures"]["losses"]) for row in measured]),
    }
    words = Template(WORDS.read_text("utf-8"), autoescape=True, trim_blocks=True).render(
        {name: Markup(picture) for name, picture in parts.items()},
        report=report,
        versions=", ".join(f"{name} {value}" for name, value in report["versions"].items()),
        measured=measured,
        products=[row["figures"]["product_tflops"] for row in measured],
        profiled=profiled,
        on_device=on_device,
        strips=_strips,
        linked=lambda row: _linked(row["figures"]["time"]["page"], folder),
    )
    return html_page.page(f"Layouts of {report['name']}", [words])


def _table(rows: Sequence[Row]) -> str:
    heads, *lines = figures.table(rows)
    found = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for row, cells in zip(rows, lines, strict=True):
        if "failed" in row["figures"]:
            reason = f"<td colspan={len(heads) - 1} class=words>{escape(cells[1][:400])}</td>"
            found.append(f"<tr class=failed><td>{escape(cells[0])}</td>{reason}</tr>")
        else:
            found.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(found)}</table>"


def _time_bar(row: Row) -> Bar:
    one = row["figures"]
    marks = (("planned", one["planned_ms"]), ("documented", row["documented_ms"]))
    shown = f"{one['ms']:,.1f} ms, {one['tflops']:,.4g} TFLOP/s/GPU"
    return Bar(row["title"], list(_spent(one)), shown, tuple((what, at) for what, at in marks if at))


def _spent(one: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the parts of a step, divided as in the recorded step; the whole step if none was recorded on a GPU."""
    time = one.get("time")
    if not (time and time["kinds"]):
        yield WHOLE, one["ms"]
        return
    shares = (time["computing"], time["exposed"], time["idle"])
    for what, share in zip(SPENT, (*shares, max(0.0, 1 - sum(shares))), strict=False):
        yield what, one["ms"] * share


def _memory_bars(measured: Sequence[Row]) -> Iterator[Bar]:
    for row in measured:
        for one in row["figures"]["memory"]:
            parts = [*one["states"].items(), *([("comes and goes", one["passing"])] if "passing" in one else [])]
            marks = (("planned", one["planned_gb"]),) if one["planned_gb"] else ()
            yield Bar(f"{row['title']}: rank {one['rank']}", parts, f"{one['gb']:,.3g} GB", marks)


def _kernel_bar(row: Row) -> Bar:
    time = row["figures"]["time"]
    parts = [(kind["kind"], kind["ms"]) for kind in time["kinds"]]
    return Bar(row["title"], parts, f"of {time['span']:,.0f} ms", ())


def _host_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """Yield a bar for each layout: the operations that take longest over all layouts, and the sum of the others."""
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for one in row["figures"]["time"]["operations"]:
            sums[one["name"]] += one["ms"]
    longest = sorted(sums, key=lambda name: -sums[name])[:SHOWN]
    for row in rows:
        time = row["figures"]["time"]
        its: defaultdict[str, float] = defaultdict(float)
        for one in time["operations"]:
            its[one["name"] if one["name"] in longest else OTHERS] += one["ms"]
        parts = [(name, its[name]) for name in (*longest, OTHERS) if its[name]]
        yield Bar(row["title"], parts, f"of {time['span']:,.0f} ms")


def _strips(row: Row) -> Markup:
    strips = row["figures"]["time"]["strips"]
    return Markup(html_page.strips([Strip(f"rank {one['rank']}, {one['span']:,.0f} ms", one) for one in strips]))


def _linked(page: str, folder: Path) -> str:
    """Path of a profile's page from the report, if it is below the report's folder."""
    return str(Path(page).relative_to(folder)) if Path(page).is_relative_to(folder) else ""
