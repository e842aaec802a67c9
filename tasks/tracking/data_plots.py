"""Figures of prepared data from their report, as PNG: lengths of rows, skipped rows, efficiency of packing."""

from typing import Any

from tasks.tracking.plots import canvas, png

SPLITS = ("training", "validation", "test")


def figures(report: dict[str, Any]) -> dict[str, bytes]:
    """Draw the figures that have any values."""
    drawn = {"token_lengths": _lengths(report), "left_out": _left_out(report), "packing": _packing(report)}
    return {name: image for name, image in drawn.items() if image}


def _lengths(report: dict[str, Any]) -> bytes | None:
    histograms = {name: report["tokens"].get(name, {}).get("histogram") for name in SPLITS}
    histograms = {name: entry for name, entry in histograms.items() if entry and any(entry["counts"])}
    if not histograms:
        return None
    drawing, axes = canvas("Length of the rows", "tokens", "rows")
    for name, entry in histograms.items():
        axes.stairs(entry["counts"], entry["edges"], label=name, linewidth=1.4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend()
    return png(drawing)


def _left_out(report: dict[str, Any]) -> bytes | None:
    counts = {reason: entry["count"] for reason, entry in report["dropped"].items() if entry["count"]}
    if not counts:
        return None
    drawing, axes = canvas("Rows left out, by reason", "rows", "")
    reasons = [reason[:50].replace("$", r"\$") for reason in counts]  # $ begins a formula
    bars = axes.barh(reasons[::-1], [*counts.values()][::-1])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    return png(drawing)


def _packing(report: dict[str, Any]) -> bytes | None:
    efficiency = {name: entry["efficiency"] for name, entry in report.get("packing", {}).items()}
    if not efficiency:
        return None
    drawing, axes = canvas("Packed sequences filled with tokens", "", "percent")
    bars = axes.bar([*efficiency], [100 * value for value in efficiency.values()], width=0.5)
    axes.bar_label(bars, fmt="{:.1f}", padding=3)
    axes.set_ylim(0, 110)
    return png(drawing)
