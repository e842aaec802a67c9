"""Figures of a training from its metrics.jsonl, as PNG: loss, rate, gradient norm, throughput, memory, experts, reward.

It uses matplotlib without pyplot, because any thread may draw. matplotlib is imported for the first figure.
"""

import math
from io import BytesIO
from pathlib import Path
from typing import Any

from tasks.tracking.tail import METRICS, parse

FIGURES = METRICS["figures"]
TOGETHER = {  # in one picture; the first is the largest
    "training": ("loss", "learning_rate", "gradient_norm"),
    "reinforcement": ("reward", "mismatch", "length"),
}


def read(path: Path) -> list[dict]:
    """Return the complete lines of a metrics file."""
    return [line for text in path.read_bytes().splitlines() if (line := parse(text))]


def figures(lines: list[dict]) -> dict[str, bytes]:
    return {name: image for name in FIGURES if (image := together(lines, (name,), 7, 4))}


def together(lines: list[dict], names: tuple[str, ...], width: float = 9, height: float = 7) -> bytes | None:
    """Return several figures over the same steps in one picture, the first the largest; None if all would be empty."""
    if not any(_curves(lines, name) for name in names):
        return None
    drawing = blank(width, height)
    ratios = (2.2, *(1 for _ in names[1:]))
    panels = drawing.subplots(len(names), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        draw(axes, lines, name)
    panels[-1].set_xlabel("step")
    return png(drawing)


def canvas(title: str, x: str, y: str) -> tuple[Any, Any]:
    """A figure and its axes."""
    drawing = blank(7, 4)
    axes = drawing.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return drawing, axes


def blank(width: float, height: float) -> Any:
    """An empty figure; sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing


def draw(axes: Any, lines: list[dict], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(title=FIGURES[name]["title"], ylabel=FIGURES[name].get("unit", ""))
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    curves = _curves(lines, name)
    for label, points in curves.items():
        marker = "o" if len(points) < 20 else ""
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, linewidth=1.4, label=label)
    if len(curves) > 1:
        axes.legend()


def _curves(lines: list[dict], name: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points of each non-empty series, by its label."""
    series = FIGURES[name]["series"]
    return {label: points for kind, key, label in series if (points := _points(lines, kind, key))}


def png(drawing: Any) -> bytes:
    image = BytesIO()
    drawing.savefig(image, format="png")
    return image.getvalue()


def _points(lines: list[dict], kind: str, key: str) -> list[tuple[int, float]]:
    points = [(line["step"], line[key]) for line in lines if line["kind"] == kind and key in line]
    return [(step, value) for step, value in points if isinstance(value, int | float) and math.isfinite(value)]
