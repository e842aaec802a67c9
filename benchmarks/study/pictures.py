"""Pictures of a study's report in SVG: bars and curves."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from contract.html_page import NAMES, WIDE, label, legend, rect, svg

AFTER, ROW = 250, 24  # pixels: space after bars, height of a row
COLOURS = (
    "#1b5e9e", "#2e7d32", "#f9a825", "#c62828", "#6a3d9a", "#00838f", "#8d6e63", "#ad1457", "#9e9d24", "#546e7a",
    "#ef6c00", "#5c6bc0", "#26a69a", "#d4e157", "#795548", "#ec407a", "#78909c", "#000000", "#80deea", "#ffcc80",
)  # fmt: skip
MARKS = {"planned": "#000", "documented": "#d500f9"}


class Bar(NamedTuple):
    name: str
    parts: list[tuple[str, float]]  # name and size
    text: str  # text after the bar
    marks: tuple[tuple[str, float], ...] = ()  # name and position


def bars(rows: Sequence[Bar], unit: str, colours: dict[str, str] | None = None) -> str:
    """Return horizontal bars, each a stack of parts. Marks are lines across a bar."""
    kinds = list(dict.fromkeys(kind for bar in rows for kind, _ in bar.parts))
    colours = colours or {kind: COLOURS[place % len(COLOURS)] for place, kind in enumerate(kinds)}
    most = max((max(sum(size for _, size in bar.parts), *(at for _, at in bar.marks), 0) for bar in rows), default=0)
    scale = (WIDE - NAMES - AFTER) / (most or 1)
    lines = list(_bars(rows, unit, colours, scale))
    marks = list(dict.fromkeys(mark for bar in rows for mark, _ in bar.marks))
    listed = [(kind, colours[kind]) for kind in kinds if len(kinds) > 1]
    listed += [(f"{mark} (a line)", MARKS.get(mark, "#000")) for mark in marks]
    return legend(listed) + svg(len(rows) * ROW, lines)


def _bars(rows: Sequence[Bar], unit: str, colours: dict[str, str], scale: float) -> Iterator[str]:
    for place, bar in enumerate(rows):
        top, left = place * ROW, float(NAMES)
        yield label(NAMES - 8, top + 16, bar.name, "end")
        for kind, size in bar.parts:
            text = f"{bar.name}: {kind} {size:,.3g} {unit}"
            yield rect(left, top + 3, size * scale, ROW - 6, colours[kind], text)
            left += size * scale
        for mark, at in bar.marks:
            x = NAMES + at * scale
            yield rect(x - 1, top, 2, ROW, MARKS.get(mark, "#000"), f"{bar.name}: {mark} {at:,.4g} {unit}")
            left = max(left, x)
        yield label(left + 8, top + 16, bar.text)


def curves(rows: Sequence[tuple[str, list[float]]]) -> str:
    """Return a picture with a line over the steps for each row."""
    rows = [(name, values) for name, values in rows if len(values) > 1]
    if not rows:
        return ""
    high, left = 300, 60
    least, most = (pick(min(values) if pick is min else max(values) for _, values in rows) for pick in (min, max))
    steps = max(len(values) for _, values in rows)
    across, up = (WIDE - left - 20) / (steps - 1), (high - 40) / ((most - least) or 1)
    lines = []
    for tick in range(5):
        value = least + (most - least) * tick / 4
        y = high - 25 - (value - least) * up
        lines += [rect(left, y, WIDE - left - 20, 1, "#ddd"), label(left - 6, y + 4, f"{value:.4g}", "end")]
    for step in range(0, steps, max(1, steps // 12)):
        lines.append(label(left + step * across, high - 6, str(step + 1), "middle"))
    for place, (name, values) in enumerate(rows):
        points = " ".join(
            f"{left + step * across:.1f},{high - 25 - (v - least) * up:.1f}" for step, v in enumerate(values)
        )
        colour = COLOURS[place % len(COLOURS)]
        dashes = f' stroke-dasharray="{4 + place},{place}"' if place else ""
        drawn = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}>'
        lines.append(f"{drawn}<title>{escape(name)}</title></polyline>")
    return legend([(name, COLOURS[place % len(COLOURS)]) for place, (name, _) in enumerate(rows)]) + svg(high, lines)
