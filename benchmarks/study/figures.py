"""Figures of a measured layout from its trial, and the reasons why its ranks use unequal memory."""

from collections.abc import Iterator, Sequence
from typing import Any

STATES = ("weights", "adapters", "gradients", "optimizer")
MEANS = {  # parts of the planned memory
    "weights": "weights",
    "adapters": "weights of adapters",
    "gradients": "gradients",
    "optimizer": "the optimizer's states",
    "copies": "weights in FP8",
    "activations": "activations that wait for the backward pass",
    "logits": "logits and their loss",
    "dispatch": "tokens on their way to experts",
    "working": "temporary memory of a layer",
}
HEADS = ("layout", "GPUs", "ms a step", "planned", "documented", "tokens/s/GPU", "TFLOP/s/GPU", "of a product")
HEADS += ("GB of the fullest", "planned", "exposed communication", "planned bubble")
WORTH = 0.01  # share of a stage's bytes; smaller differences are not listed


def of(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a layout for the table and the pictures, in milliseconds, gigabytes (10^9) and shares."""
    if reason := failure(answer):
        return {"failed": reason}
    ranks = answer["ranks"]
    slowest = max(ranks, key=lambda rank: rank["measured"]["seconds"])
    seconds, planned = slowest["measured"]["seconds"], slowest["planned"].get("seconds")
    found = {
        "gpus": len(ranks),
        "ms": seconds * 1e3,
        "all_ms": [one * 1e3 for one in slowest["seconds"]],
        "planned_ms": planned and planned * 1e3,
        "of_planned_ms": planned and seconds / planned,
        "tokens_per_second_per_gpu": answer["tokens"] / seconds / len(ranks),
        "tflops": answer["tflops"],
        "product_tflops": answer["product_tflops"],
        "share_of_product": answer["share_of_product"],
        "planned_bubble": answer["bubble"],
        "losses": next((rank["losses"] for rank in reversed(ranks) if rank["losses"]), []),
        "memory": [_memory(rank) for rank in ranks],
        "why": why(ranks),
    }
    found["gb"] = max((one["gb"] for one in found["memory"]), default=0.0)
    plans = [one["planned_gb"] for one in found["memory"] if one["planned_gb"]]
    found["planned_gb"] = max(plans, default=None)
    return found | ({"time": _time(answer["profile"])} if answer.get("profile") else {})


def table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the heads and a line for each row, without empty columns. A failed row has only its reason."""
    lines = [_cells(row) for row in rows]
    whole = [line for line in lines if len(line) == len(HEADS)]
    shown = [place for place in range(len(HEADS)) if any(line[place] for line in whole)] or [0, 1]
    lines = [[line[place] for place in shown] if len(line) == len(HEADS) else line for line in lines]
    return [[HEADS[place] for place in shown], *lines]


def _cells(row: dict[str, Any]) -> list[str]:
    """Cells of a layout; unknown values are empty."""
    one = row["figures"]
    if "failed" in one:
        return [row["title"], one["failed"]]
    communication = f"{one['time']['exposed']:.1%}" if one.get("time", {}).get("kinds") else ""
    bubble = f"{one['planned_bubble']:.1%}" if one["planned_bubble"] else ""
    cells = [row["title"], str(one["gpus"]), f"{one['ms']:,.1f}", _planned(one["planned_ms"], one["ms"])]
    cells += [_planned(row["documented_ms"], one["ms"]), f"{one['tokens_per_second_per_gpu']:,.0f}"]
    cells += [f"{one['tflops']:,.4g}", f"{one['share_of_product']:.1%}", f"{one['gb']:,.3g}"]
    return [*cells, _planned(one["planned_gb"], one["gb"]), communication, bubble]


def _planned(value: float | None, measured: float) -> str:
    """A predicted figure, and the ratio of the measured one to it."""
    return f"{value:,.4g} ({measured / value:.2f})" if value else ""


def failure(answer: dict[str, Any]) -> str | None:
    if "failed" in answer:
        return answer["failed"]
    if seen := answer.get("out_of_memory"):
        return f"out of memory on rank {seen['rank']}, with {seen['allocated'] / 1e9:.1f} GB allocated"
    return None


def _memory(rank: dict[str, Any]) -> dict[str, Any]:
    """Gigabytes of a rank: permanent states, and temporary memory up to the peak."""
    measured, planned = rank["measured"], rank["planned"]
    states = {name: measured[name] / 1e9 for name in STATES if measured[name]}
    held, peak = sum(states.values()), measured.get("allocated", 0) / 1e9
    found = {"rank": rank["rank"], "stage": rank["stage"], "states": states, "gb": max(peak, held)}
    if peak:
        found["passing"] = max(0.0, peak - held)
    return found | {"planned_gb": planned["allocated"] / 1e9 if "allocated" in planned else None}


def why(ranks: list[dict[str, Any]]) -> list[str]:
    """Explain by which parts the memory of each pipeline stage exceeds that of the smallest stage in the plan."""
    stages = {rank["stage"]: rank["parts"] for rank in ranks}
    totals = {stage: sum(parts[name] for name in MEANS) for stage, parts in stages.items()}
    least = min(totals, key=lambda stage: totals[stage])
    lines = []
    for stage, parts in stages.items():
        if (more := totals[stage] - totals[least]) > WORTH * totals[stage]:
            told = ", ".join(_differences(parts, stages[least], WORTH * totals[stage]))
            lines.append(f"stage {stage} is planned {_size(more)} above stage {least}: {told}")
    if not lines:
        return [f"all {len(ranks)} ranks use equal memory"] if len(ranks) > 1 else []
    return lines


def _differences(mine: dict[str, int], its: dict[str, int], least: float) -> Iterator[str]:
    by = {name: mine[name] - its[name] for name in MEANS}
    for name, more in sorted(by.items(), key=lambda one: -abs(one[1])):
        if abs(more) > least:
            yield f"{MEANS[name]} {'+' if more > 0 else '-'}{_size(abs(more))}"


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _time(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the time shares of the recorded step on the rank that computes least, and its communication."""
    row = min(profile["ranks"], key=lambda rank: rank["computing"])
    talks = [one | {"hidden": max(0.0, one["ms"] - one["exposed"])} for one in row["exposed_by"]]
    return {
        "rank": row["rank"],
        "span": row["span"],
        "computing": row["computing"],
        "exposed": row["exposed"],
        "hidden": max(0.0, row["communication"] - row["exposed"]),
        "idle": max(0.0, 1 - row["busy"]),
        "kinds": row["kernels"],
        "communication": talks,
        "operations": row["operations"],
        "slowed": profile.get("slowed"),
        "strips": [{"rank": rank["rank"], "span": rank["span"], **rank["strip"]} for rank in profile["ranks"]],
        "page": profile["page"],
    }
