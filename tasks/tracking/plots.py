"""Figures of a training from its metrics.jsonl, as PNG: loss, rate, gradient norm, throughput, memory, experts, reward.

It uses matplotlib without pyplot, as any thread may draw. matplotlib is imported at the first figure.
"""

import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

# Title, unit and series (kind of line, key, label) of each figure. A figure without any values is not drawn.
FIGURES = {
    "loss": (
        "Loss",
        "nats per token",
        [
            ("train", "lm_loss", "training"),
            ("validation", "lm_loss", "validation"),
            ("train", "mtp_loss", "multi-token prediction"),
        ],
    ),
    "perplexity": ("Perplexity of the validation data", "", [("validation", "perplexity", "validation")]),
    "learning_rate": ("Learning rate", "", [("train", "lr", "learning rate")]),
    "gradient_norm": ("Gradient norm", "", [("train", "grad_norm", "before clipping")]),
    "throughput": ("Throughput", "tokens per second, without padding", [("train", "tokens_per_second", "all devices")]),
    "memory": ("Memory, highest of any rank", "GB", [("train", "memory_gb", "peak")]),
    "expert_load": (
        "Busiest expert's load over the mean load",
        "times",
        [("train", "expert_load_max", "worst layer"), ("train", "expert_load_mean", "mean of the layers")],
    ),
    "preference": (
        "Rows whose chosen answer has the higher reward",
        "share",
        [("train", "rewards/accuracy", "training"), ("validation", "rewards/accuracy", "validation")],
    ),
    "margin": (
        "Reward of the chosen answer over the rejected one's",
        "",
        [("train", "rewards/margin", "training"), ("validation", "rewards/margin", "validation")],
    ),
    "reward": (
        "Reward",
        "",
        [("reinforce", "reward", "mean of the answers"), ("reinforce", "reward_best", "best of each group")],
    ),
    "mismatch": (
        "Difference of vLLM and trainer",
        "nats per token",
        [("reinforce", "mismatch", "mean of a step's tokens")],
    ),
    "length": (
        "Length of answers",
        "tokens",
        [("reinforce", "length", "mean"), ("reinforce", "length_max", "longest")],
    ),
}
OF_TRAINING = ("loss", "learning_rate", "gradient_norm")
OF_REINFORCEMENT = ("reward", "mismatch", "length")


def read(path: Path) -> list[dict]:
    """The complete lines of a metrics file."""
    lines = []
    for text in path.read_text("utf-8", "replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "kind" in line and "step" in line:
            lines.append(line)
    return lines


def figures(lines: list[dict]) -> dict[str, bytes]:
    return {name: image for name in FIGURES if (image := figure(name, lines))}


def figure(name: str, lines: list[dict]) -> bytes | None:
    title, unit, series = FIGURES[name]
    if not _curves(lines, series):
        return None
    drawing, axes = canvas(title, "step", unit)
    draw(axes, lines, series)
    return png(drawing)


def together(lines: list[dict], names: tuple[str, ...]) -> bytes | None:
    """Figures in one picture, over the same steps; the first is the largest. None if all would be empty."""
    if not any(_curves(lines, FIGURES[name][2]) for name in names):
        return None
    drawing = blank(9, 7)
    panels = drawing.subplots(len(names), 1, sharex=True, height_ratios=(2.2, *(1 for _ in names[1:])))
    for axes, name in zip(panels, names, strict=True):
        title, unit, series = FIGURES[name]
        draw(axes, lines, series)
        axes.set(title=title, ylabel=unit)
        axes.grid(alpha=0.3)
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


Series = list[tuple[str, str, str]]  # kind of line, key, label


def draw(axes: Any, lines: list[dict], series: Series) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    curves = _curves(lines, series)
    for label, points in curves.items():
        marker = "o" if len(points) < 20 else ""
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, linewidth=1.4, label=label)
    if len(curves) > 1:
        axes.legend()


def _curves(lines: list[dict], series: Series) -> dict[str, list[tuple[int, float]]]:
    return {label: points for kind, key, label in series if (points := _points(lines, kind, key))}


def png(drawing: Any) -> bytes:
    image = BytesIO()
    drawing.savefig(image, format="png")
    return image.getvalue()


def _points(lines: list[dict], kind: str, key: str) -> list[tuple[int, float]]:
    points = [(line["step"], line[key]) for line in lines if line["kind"] == kind and key in line]
    return [(step, value) for step, value in points if isinstance(value, int | float) and math.isfinite(value)]
