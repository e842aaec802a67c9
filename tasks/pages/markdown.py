"""Pages in Markdown for Prefect: templates next to this file, and pieces. Texts from data or a model are escaped."""

import base64
import re
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from contract.amounts import clock, dollars

SHOWN = 60  # characters of a cell


def code(text: str, most: int = SHOWN) -> str:
    """Return text as code in one line, also for a table."""
    text = " ".join(clean(text).split())
    shown = text if len(text) <= most else text[: most - 3] + "..."
    return "`" + shown.replace("`", "'").replace("|", "¦") + "`" if shown else ""


def words(text: str) -> str:
    """Return text as plain words in one line. Underscores within a word are not escaped: MLflow shows the escapes."""
    return re.sub(r"([\\`*{}\[\]<>#|~$!&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", " ".join(clean(text).split()))


def fitted(text: str, width: int, lines: int = 4) -> str:
    """Return text as a few short lines of a table's cell, because Prefect's tables do not wrap."""
    text = " ".join(clean(text).split())
    return "<br>".join(map(words, textwrap.wrap(text, width, max_lines=lines, placeholder=" \N{HORIZONTAL ELLIPSIS}")))


def fenced(text: str) -> str:
    """Return text as a block with unchanged lines."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{clean(text)}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table. The cells must be Markdown."""
    rows = ["| " + " | ".join(row) + " |" for row in rows]
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *rows] if rows else []


def embedded(name: str, png: bytes) -> str:
    """Return Markdown with an embedded picture."""
    return f"![{name}](data:image/png;base64,{base64.b64encode(png).decode()})"


def as_of(when: float, links: dict[str, str]) -> list[str]:
    """Return the last lines of a page that is updated: its time, and links."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))
    line = f"As of {at}. Reload the page for newer figures; MLflow's curves update automatically."
    return ["", line, "", *(f"- [{title}](<{address}>)" for title, address in links.items())]


def clean(text: str) -> str:
    """Replace characters that a database or a browser refuses: halves of surrogate pairs, and control characters."""
    text = text.encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def digits(value: float | None, count: int = 3) -> str:
    """Return a number with `count` significant digits; "" if it is unknown."""
    return "" if value is None else f"{value:.{count}g}"


def render(template: str, /, **values: object) -> str:
    """Fill a template of this folder."""
    return PAGES.get_template(f"{template}.md.j2").render(values)


PAGES = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
PAGES.keep_trailing_newline = True
PAGES.filters |= {"code": code, "words": words, "fitted": fitted, "fenced": fenced}
PAGES.filters |= {
    "number": "{:,}".format,
    "percent": "{:.1%}".format,
    "digits": digits,
    "clock": clock,
    "dollars": dollars,
}
