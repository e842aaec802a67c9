"""Figures of reports, as PNG.

For prepared data: lengths of rows, skipped rows, efficiency of packing. For a plan: the memory of every pipeline stage,
and the content of each GPU. For a training: its time by category.
"""

# pyright: reportAttributeAccessIssue=false

from typing import Any

from tasks.tracking.plots import blank, canvas, png

SPLITS = ("training", "validation", "test")
GB = 1e9
PARTS = ("weights", "gradients", "optimizer", "adapters", "activations")
STAGES = 32  # drawn; a longer pipeline shows the first, the last and the fullest
HOSTS = 8  # kinds of hosts that are drawn


def of_data(report: dict[str, Any]) -> dict[str, bytes]:
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


def of_time(seconds: dict[str, float]) -> bytes:
    """Draw a training's time by category."""
    drawing, axes = canvas("Time of the training", "hours", "")
    names = [*seconds][::-1]
    bars = axes.barh(names, [seconds[name] / 3600 for name in names])
    whole = sum(seconds.values()) or 1.0
    axes.bar_label(bars, [f"{seconds[name] / whole:.1%}" for name in names], padding=3)
    return png(drawing)


def of_plan(plan: dict[str, Any]) -> dict[str, bytes]:
    """Draw the figures of a plan; none for an illegal layout, which has no stages."""
    if not plan["stages"]:
        return {}
    stages, hosts = _shown(plan), plan["picture"]["hosts"][:HOSTS]
    heights = (1.5 + 0.3 * len(stages), 1.0 + 0.6 * len(hosts))
    drawing = blank(11, sum(heights))
    above, below = drawing.subplots(2, 1, height_ratios=heights)
    _memory(above, plan, stages)
    _holders(below, plan, hosts)
    return {"plan": png(drawing)}


def _shown(plan: dict[str, Any]) -> list[dict[str, Any]]:
    stages = plan["stages"]
    if len(stages) <= STAGES:
        return stages
    ends = {*range(STAGES // 2), *range(len(stages) - STAGES // 2, len(stages)), plan["fullest"]}
    return [stages[place] for place in sorted(ends)]


def _memory(axes: Any, plan: dict[str, Any], stages: list[dict[str, Any]]) -> None:
    names = [f"stage {stage['rank']}{'  fullest' if stage['rank'] == plan['fullest'] else ''}" for stage in stages]
    left = [0.0] * len(stages)
    others = [key for key in stages[0] if key not in (*PARTS, "rank", "total", "over")]
    for label, keys in (*((part, [part]) for part in PARTS), ("other", others)):
        widths = [sum(stage[key] for key in keys) / GB for stage in stages]
        axes.barh(names, widths, left=left, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(plan["gpu_memory"] / GB, color="black", linestyle="--", label=plan["gpu"])
    axes.invert_yaxis()
    axes.set(title=f"{plan['name']}: {plan['verdict']}"[:110], xlabel="GB on each GPU of the stage")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)


def _holders(axes: Any, plan: dict[str, Any], hosts: list[dict[str, Any]]) -> None:
    """Draw a row for each kind of host and a cell for each GPU, with a colour for each pipeline stage."""
    from matplotlib import colormaps

    of, colours = plan["picture"]["of"], colormaps["Pastel1"].colors
    widest = max(len(host["gpus"]) for host in hosts)
    for row, host in enumerate(hosts):
        for gpu, share in enumerate(host["gpus"]):
            colour = colours[share["stage"] % len(colours)]
            axes.barh(row, 1, height=1, left=gpu, align="edge", color=colour, edgecolor="white")
            axes.text(gpu + 0.5, row + 0.5, _text(share, of), ha="center", va="center", fontsize=7)
    names = [f"hosts {', '.join(map(str, host['hosts'][:4]))}{', ...' * (len(host['hosts']) > 4)}" for host in hosts]
    axes.set(xlim=(0, widest), ylim=(len(hosts), 0), title="What each GPU holds; a colour is a stage", xlabel="GPU")
    axes.set_yticks([row + 0.5 for row in range(len(hosts))], names)
    axes.set_xticks([gpu + 0.5 for gpu in range(widest)], [str(gpu) for gpu in range(widest)])


def _text(share: dict[str, Any], of: dict[str, int]) -> str:
    lines = [f"tp {share['tp']}/{of['tp']}"] if of["tp"] > 1 else []
    if of["experts"]:
        first, last = share["experts"]
        lines.append(f"experts {first}-{last}")
    if of["etp"] > 1:
        lines.append(f"etp {share['etp']}/{of['etp']}")
    return "\n".join(lines) or "whole"
