"""HTML pages without a server or network, with pictures in SVG.

page(title, parts)    the complete page; strips() returns a part, a picture of what devices do over time
legend(), svg(), ...  pieces of other pictures
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

STYLE = Path(__file__).with_name("html_page.css").read_text("utf-8")
WIDE, NAMES = 1150, 210  # pixels: width of a picture, and of the names in it
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


def strips(rows: Sequence[Strip]) -> str:
    """Return a strip for each rank with the activities of its device in the recorded step, from left to right."""
    lines, high = [], 34
    for place, (name, shares, gaps) in enumerate(rows):
        start = place * (high + 4)
        lines.append(label(NAMES - 8, start + 21, name, "end"))
        columns = len(shares["computing"])
        width = (WIDE - NAMES) / columns
        for column in range(columns):
            left, right = (round(NAMES + (column + side) * width) for side in (0, 1))  # whole pixels: no seams
            top = start + float(high)
            for kind, (colour, _) in STRIP.items():
                if share := shares[kind][column]:
                    top -= share * high
                    lines.append(rect(left, top, right - left, share * high, colour))
        for gap in gaps:
            x, wide = NAMES + gap.at * (WIDE - NAMES), max(2.0, gap.wide * (WIDE - NAMES))
            lines.append(rect(x, start, wide, 4, "#000", gap.text))
    return svg(len(rows) * (high + 4), lines)


def strip_legend() -> str:
    return legend([(means, colour) for colour, means in STRIP.values()])


def legend(kinds: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f'<span><i style="background:{colour}"></i>{escape(kind)}</span>' for kind, colour in kinds)
    return f"<p class=legend>{shown}</p>" if kinds else ""


def svg(high: float, lines: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDE} {high:g}" role="img">\n' + "\n".join(lines) + "\n</svg>"


def rect(x: float, y: float, wide: float, high: float, colour: str, text: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, wide):.2f}" height="{high:.1f}" fill="{colour}"'
    return f"<rect {place}><title>{escape(text)}</title></rect>" if text else f"<rect {place}/>"


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
