"""The report of a study as one page of HTML that needs no server and no network."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from contract import html_page
from contract.html_page import Bar, Strip

SHOWN, OTHERS = 12, "other operations"  # operations of a host that have their own name and colour
WHOLE = "a step"
SPENT = {"computing": "#2e7d32", "exposed communication": "#c62828", "idle": "#b0bec5", "copies and fills": "#f9a825"}
SPENT |= {WHOLE: "#1b5e9e"}

Row = dict[str, Any]  # title, configuration, overrides, documented_ms, and figures or failed


def of(report: dict[str, Any], folder: Path) -> str:
    rows = report["rows"]
    measured = [row for row in rows if "failed" not in row["figures"]]
    profiled = [row for row in measured if "time" in row["figures"]]
    return html_page.page(
        f"Layouts of {report['name']}",
        [
            *_head(report, measured),
            "<h2>At a glance</h2>",
            _table(rows),
            "<h2>Time of a step</h2>",
            _times(measured),
            "<h2>Memory of each rank</h2>",
            *_memory(measured),
            *_kinds(profiled, folder),
            "<h2>Loss</h2>",
            "<p>Of the same made-up tokens at each step. Each rank draws its weights: curves of layouts "
            "start apart for this reason.</p>",
            html_page.curves([(row["title"], row["figures"]["losses"]) for row in measured]),
            "<h2>Again</h2>",
            *_commands(report),
        ],
    )


def _head(report: dict[str, Any], measured: Sequence[Row]) -> Iterator[str]:
    versions = ", ".join(f"{escape(name)} {escape(value)}" for name, value in report["versions"].items())
    yield f"<p>{escape(report['made'])}; {versions}.</p>"
    for of, means in report["lists"].items():
        yield f"<p><b>{escape(of)}</b>: {escape(means)}.</p>"
    products = [row["figures"]["product_tflops"] for row in measured]
    if products:
        yield (
            f"<p>A large matrix product, measured on every rank right after the steps: {min(products):.4g} to "
            f"{max(products):.4g} TFLOP/s. Shares are of the one of the same layout.</p>"
        )


def _table(rows: Sequence[Row]) -> str:
    heads = ["layout", "GPUs", "ms a step", "planned", "documented", "tokens/s/GPU", "TFLOP/s/GPU", "of a product"]
    heads += ["GB of the fullest", "planned", "exposed communication", "planned bubble"]
    told = {row["title"]: _cells(row) for row in rows if "failed" not in row["figures"]}
    shown = [place for place in range(len(heads)) if any(cells[place] for cells in told.values())]
    found = [f"<tr>{''.join(f'<th>{heads[place]}</th>' for place in shown or [0])}</tr>"]
    for row in rows:
        if cells := told.get(row["title"]):
            found.append(f"<tr>{''.join(f'<td>{cells[place]}</td>' for place in shown)}</tr>")
            continue
        found.append(
            f"<tr class=failed><td>{escape(row['title'])}</td><td colspan={max(1, len(shown) - 1)} class=words>"
            f"{escape(row['figures']['failed'][:400])}</td></tr>"
        )
    return f"<table>{''.join(found)}</table>"


def _cells(row: Row) -> list[str]:
    """Cells of a measured layout; unknown values are empty."""
    one = row["figures"]
    communication = f"{one['time']['exposed']:.1%}" if one.get("time", {}).get("kinds") else ""
    cells = [escape(row["title"]), str(one["gpus"]), f"{one['ms']:,.1f}", _planned(one["planned_ms"], one["ms"])]
    cells += [_planned(row["documented_ms"], one["ms"]), f"{one['tokens_per_second_per_gpu']:,.0f}"]
    cells += [f"{one['tflops']:,.4g}", f"{one['share_of_product']:.1%}", f"{one['gb']:,.3g}"]
    return [*cells, _planned(one["planned_gb"], one["gb"]), communication, _share(one["planned_bubble"])]


def _planned(value: float | None, measured: float) -> str:
    """A predicted figure, and the ratio of the measured one to it."""
    return f"{value:,.4g} ({measured / value:.2f})" if value else ""


def _share(value: float) -> str:
    return f"{value:.1%}" if value else ""


def _times(measured: Sequence[Row]) -> str:
    rows = []
    for row in measured:
        one = row["figures"]
        marks = (("planned", one["planned_ms"]), ("documented", row["documented_ms"]))
        shown = f"{one['ms']:,.1f} ms, {one['tflops']:,.4g} TFLOP/s/GPU"
        rows.append(Bar(row["title"], list(_spent(one)), shown, tuple((what, at) for what, at in marks if at)))
    return html_page.bars(rows, "ms", SPENT)


def _spent(one: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Parts of a step, as its recorded one was divided; the whole where none was recorded on a device."""
    time = one.get("time")
    if not (time and time["kinds"]):
        yield WHOLE, one["ms"]
        return
    shares = (time["computing"], time["exposed"], time["idle"])
    for what, share in zip(SPENT, (*shares, max(0.0, 1 - sum(shares))), strict=False):
        yield what, one["ms"] * share


def _memory(measured: Sequence[Row]) -> Iterator[str]:
    rows = []
    for row in measured:
        for one in row["figures"]["memory"]:
            parts = [*one["states"].items(), *([("comes and goes", one["passing"])] if "passing" in one else [])]
            marks = (("planned", one["planned_gb"]),) if one["planned_gb"] else ()
            rows.append(Bar(f"{row['title']}: rank {one['rank']}", parts, f"{one['gb']:,.3g} GB", marks))
    yield "<p>At the highest mark of torch's allocator; states are counted tensor by tensor.</p>"
    yield html_page.bars(rows, "GB")
    said = [f"<li>{escape(row['title'])}: {escape(line)}" for row in measured for line in row["figures"]["why"]]
    if said:
        yield f"<p>How the ranks of a layout compare:</p><ul>{''.join(said)}</ul>"


def _kinds(profiled: Sequence[Row], folder: Path) -> Iterator[str]:
    if not profiled:
        return
    yield "<h2>What the time goes into</h2>"
    yield "<p>One recorded step, of the rank that computes least. Kernels that run at once count twice.</p>"
    on_device = [row for row in profiled if row["figures"]["time"]["kinds"]]
    if on_device:
        yield html_page.bars([_kernel_bar(row) for row in on_device], "ms")
        yield _communication(on_device)
        yield "<h2>What each rank does when</h2>"
        yield "<p>One recorded step from left to right; the gaps of a pipeline are its bubbles.</p>"
        yield html_page.strip_legend()
        for row in on_device:
            time = row["figures"]["time"]
            yield f"<h3>{escape(row['title'])}{_linked(time['page'], folder)}</h3>"
            names = [f"rank {strip['rank']}, {strip['span']:,.0f} ms" for strip in time["strips"]]
            yield html_page.strips([Strip(*pair) for pair in zip(names, time["strips"], strict=True)])
    else:
        yield "<p>No kernels without a GPU: operations of the host, each without its parts.</p>"
        yield html_page.bars(list(_host_bars(profiled)), "ms")


def _kernel_bar(row: Row) -> Bar:
    time = row["figures"]["time"]
    parts = [(kind["kind"], kind["ms"]) for kind in time["kinds"]]
    return Bar(row["title"], parts, f"of {time['span']:,.0f} ms", ())


def _host_bars(rows: Sequence[Row]) -> Iterator[Bar]:
    """A bar for each layout, of the operations that take longest in all of them together, and of the others."""
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


def _communication(rows: Sequence[Row]) -> str:
    heads = ("layout", "collective", "group", "number", "ms", "exposed ms", "hidden ms", "MB")
    found = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for row in rows:
        for one in row["figures"]["time"]["communication"]:
            cells = [row["title"], one["kind"], one["group"], str(one["count"]), f"{one['ms']:,.2f}"]
            cells += [f"{one['exposed']:,.2f}", f"{one['hidden']:,.2f}", f"{one['megabytes']:,.1f}"]
            found.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(found)}</table>" if len(found) > 1 else "<p>No rank talks to another.</p>"


def _linked(page: str, folder: Path) -> str:
    """Link to the page of a profile if its file is below the report's folder."""
    try:
        return f' <a href="{escape(str(Path(page).relative_to(folder)))}">its profile</a>'
    except ValueError:
        return ""


def _commands(report: dict[str, Any]) -> Iterator[str]:
    yield "<p>Each row is one command:</p><ul>"
    for row in report["rows"]:
        yield f"<li>{escape(row['title'])}: <code>{escape(row['command'])}</code>"
    yield "</ul>"
