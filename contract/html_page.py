"""HTML pages without a server or network, with pictures in SVG: bars, strips of time, and curves.

page(title, parts)    the complete page; bars(), strips() and curves() return parts
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

STYLE = Path(__file__).with_name("html_page.css").read_text("utf-8")
WIDE, NAMES, AFTER, ROW = 1150, 210, 250, 24  # pixels: width of a picture, space before and after bars, height of a row
COLOURS = (
    "#1b5e9e", "#2e7d32", "#f9a825", "#c62828", "#6a3d9a", "#00838f", "#8d6e63", "#ad1457", "#9e9d24", "#546e7a",
    "#ef6c00", "#5c6bc0", "#26a69a", "#d4e157", "#795548", "#ec407a", "#78909c", "#000000", "#80deea", "#ffcc80",
)  # fmt: skip
MARKS = {"planned": "#000", "documented": "#d500f9"}
STRIP = {  # activities of a device, as in trainer/profiling
    "computing": ("#2e7d32", "computing"),
    "exposed": ("#c62828", "communication while nothing computes"),
    "host late": ("#f9a825", "idle: the host is late"),
    "after a wait": ("#fdd835", "idle: the host had waited for the device"),
    "dependency": ("#90a4ae", "idle: waits for other ranks, or for an earlier operation"),
}


class Gap(NamedTuple):
    """A mark above a strip. Its place and width are shares of the strip."""

    at: float
    wide: float
    text: str


class Strip(NamedTuple):
    name: str
    shares: dict[str, list[float]]  # by activity of the device: a share for each column
    gaps: Sequence[Gap] = ()


def page(title: str, parts: Iterable[str]) -> str:
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    head = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    return f'<!doctype html>\n<meta charset="utf-8">{head}\n{body}\n'


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
    legend = [(kind, colours[kind]) for kind in kinds if len(kinds) > 1]
    legend += [(f"{mark} (a line)", MARKS.get(mark, "#000")) for mark in marks]
    return _legend(legend) + _svg(len(rows) * ROW, lines)


def _bars(rows: Sequence[Bar], unit: str, colours: dict[str, str], scale: float) -> Iterator[str]:
    for place, bar in enumerate(rows):
        top, left = place * ROW, float(NAMES)
        yield _text(NAMES - 8, top + 16, bar.name, "end")
        for kind, size in bar.parts:
            text = f"{bar.name}: {kind} {size:,.3g} {unit}"
            yield _rect(left, top + 3, size * scale, ROW - 6, colours[kind], text)
            left += size * scale
        for mark, at in bar.marks:
            x = NAMES + at * scale
            yield _rect(x - 1, top, 2, ROW, MARKS.get(mark, "#000"), f"{bar.name}: {mark} {at:,.4g} {unit}")
            left = max(left, x)
        yield _text(left + 8, top + 16, bar.text)


def strips(rows: Sequence[Strip]) -> str:
    """Return a strip for each rank with the activities of its device in the recorded step, from left to right."""
    lines, high = [], 34
    for place, (name, shares, gaps) in enumerate(rows):
        start = place * (high + 4)
        lines.append(_text(NAMES - 8, start + 21, name, "end"))
        columns = len(shares["computing"])
        width = (WIDE - NAMES) / columns
        for column in range(columns):
            left, right = (round(NAMES + (column + side) * width) for side in (0, 1))  # whole pixels: no seams
            top = start + float(high)
            for kind, (colour, _) in STRIP.items():
                if share := shares[kind][column]:
                    top -= share * high
                    lines.append(_rect(left, top, right - left, share * high, colour))
        for gap in gaps:
            x, wide = NAMES + gap.at * (WIDE - NAMES), max(2.0, gap.wide * (WIDE - NAMES))
            lines.append(_rect(x, start, wide, 4, "#000", gap.text))
    return _svg(len(rows) * (high + 4), lines)


def strip_legend() -> str:
    return _legend([(means, colour) for colour, means in STRIP.values()])


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
        lines += [_rect(left, y, WIDE - left - 20, 1, "#ddd"), _text(left - 6, y + 4, f"{value:.4g}", "end")]
    for step in range(0, steps, max(1, steps // 12)):
        lines.append(_text(left + step * across, high - 6, str(step + 1), "middle"))
    for place, (name, values) in enumerate(rows):
        points = " ".join(
            f"{left + step * across:.1f},{high - 25 - (v - least) * up:.1f}" for step, v in enumerate(values)
        )
        colour = COLOURS[place % len(COLOURS)]
        dashes = f' stroke-dasharray="{4 + place},{place}"' if place else ""
        drawn = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}>'
        lines.append(f"{drawn}<title>{escape(name)}</title></polyline>")
    return _legend([(name, COLOURS[place % len(COLOURS)]) for place, (name, _) in enumerate(rows)]) + _svg(high, lines)


def _legend(kinds: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in kinds)
    return f"<p class=legend>{shown}</p>" if kinds else ""


def _svg(high: float, lines: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDE} {high:g}" role="img">\n' + "\n".join(lines) + "\n</svg>"


def _rect(x: float, y: float, wide: float, high: float, colour: str, text: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, wide):.2f}" height="{high:.1f}" fill="{colour}"'
    return f"<rect {place}><title>{escape(text)}</title></rect>" if text else f"<rect {place}/>"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
