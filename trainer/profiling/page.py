"""Page of a profile: a strip for each rank shows how its device spent the time, with the costliest gaps above it."""

from collections.abc import Iterator
from html import escape
from typing import Any

from contract import html_page
from contract.html_page import Gap, Strip


def of(answer: dict[str, Any], words: list[str]) -> str:
    parts = (
        html_page.strip_legend(),
        "<p>The rest are copies, fills and gaps below 2 us.</p>",
        *(part for row in answer["ranks"] for part in _strip(row)),
        "<h2>Report</h2>",
        f"<pre>{escape(chr(10).join(words))}</pre>",
    )
    return html_page.page(f"Profile of {answer.get('name', 'a training')}", parts)


def _strip(row: dict[str, Any]) -> Iterator[str]:
    yield f"<p>rank {row['rank']}: {row['span']:,.1f} ms, {row['computing']:.1%} computing, {row['busy']:.1%} busy</p>"
    yield html_page.strips(
        [Strip(f"rank {row['rank']}", row["strip"], [_gap(gap, row["span"]) for gap in row["gaps"]])]
    )


def _gap(gap: dict[str, Any], span: float) -> Gap:
    host = ", ".join(f"{name} {took}" for name, took in gap["host"])
    return Gap(gap["at"] / span, gap["ms"] / span, f"{gap['ms']:.3f} ms, {gap['cause']}: {host}")
