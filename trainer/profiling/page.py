"""Page of a profile: one HTML file that needs no server. A strip for each rank shows how its device spent the time."""

from collections.abc import Iterator
from html import escape
from typing import Any

from trainer.profiling import gaps

COLOURS = {
    "computing": "#2e7d32",
    "exposed": "#c62828",
    gaps.LATE: "#f9a825",
    gaps.WAITED: "#fdd835",
    gaps.DEPENDS: "#90a4ae",
}
MEANS = {
    "computing": "computing, also while other work runs",
    "exposed": "communication while nothing computes",
    gaps.LATE: "idle: the host is late",
    gaps.WAITED: "idle: the host had waited for the device",
    gaps.DEPENDS: "idle: the next work waits for other work",
}
HIGH, WIDE = 60, 1200
STYLE = """body{font:14px/1.4 system-ui,sans-serif;margin:2em;color:#222;max-width:1250px}
pre{background:#f6f6f6;padding:1em;overflow-x:auto}svg{display:block;background:#eee;width:100%}
i{display:inline-block;width:1em;height:1em;margin:0 .4em 0 1.2em;vertical-align:-.1em}"""


def of(answer: dict[str, Any], words: list[str]) -> str:
    name = escape(str(answer.get("name", "a training")))
    legend = "".join(f'<i style="background:{colour}"></i>{MEANS[kind]}' for kind, colour in COLOURS.items())
    strips = "\n".join(line for row in answer["ranks"] for line in _strip(row))
    text = escape("\n".join(words))
    return f"""<!doctype html>
<meta charset="utf-8"><title>Profile of {name}</title><style>{STYLE}</style>
<h1>Profile of {name}</h1>
<p>{legend}; the rest are copies, fills and gaps below 2 us.</p>
{strips}
<h2>Report</h2>
<pre>{text}</pre>
"""


def _strip(row: dict[str, Any]) -> Iterator[str]:
    title = f"rank {row['rank']}: {row['span']:,.1f} ms, {row['computing']:.1%} computing, {row['busy']:.1%} busy"
    yield f"<p>{title}</p>"
    yield f'<svg viewBox="0 0 {WIDE} {HIGH}" height="{HIGH}" preserveAspectRatio="none" role="img">'
    yield f"<title>{title}</title>"
    width = WIDE / gaps.COLUMNS
    for column in range(gaps.COLUMNS):
        top = float(HIGH)
        for kind, colour in COLOURS.items():
            if share := row["strip"][kind][column]:
                top -= (high := share * HIGH)
                place = f'x="{column * width:g}" y="{top:.1f}" width="{width:g}" height="{high:.1f}"'
                yield f'<rect {place} fill="{colour}"/>'
    for gap in row["gaps"]:
        left = WIDE * gap["at"] / row["span"]
        host = ", ".join(f"{name} {took}" for name, took in gap["host"])
        title = escape(f"{gap['ms']:.3f} ms, {gap['cause']}: {host}")
        wide = max(2.0, WIDE * gap["ms"] / row["span"])
        yield f'<rect x="{left:.1f}" y="0" width="{wide:.1f}" height="6" fill="#000"><title>{title}</title></rect>'
    yield "</svg>"
