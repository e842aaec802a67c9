"""Answers of trials as two GPUs would give them, made up."""

import json
from typing import Any

COLUMNS = 600
PARTS = ("weights", "gradients", "optimizer", "adapters", "copies", "activations", "logits", "dispatch", "working")


def answer(ranks: int = 2, pp: int = 1, ms: float = 400.0, profile: str | None = None) -> dict[str, Any]:
    """The answer of a trial; the last stage of a pipeline holds the logits as well."""
    rows = []
    for rank in range(ranks):
        stage = rank * pp // ranks
        logits = 6_600_000_000 if stage == pp - 1 else 0
        held = dict(zip(PARTS, (2e9 / pp, 4e9 / pp, 12e9 / pp, 0, 0, 40e9 / pp, logits, 0, 1e9), strict=True))
        parts = {name: int(size) for name, size in held.items()}
        total = sum(parts.values())
        states = {name: parts[name] for name in ("weights", "adapters", "gradients", "optimizer")}
        measured = {**states, "host_states": 0, "seconds": ms / 1e3 + rank * 1e-3, "allocated": total * 1.02}
        planned = {**states, "allocated": total, "seconds": ms / 1e3 * 0.95}
        losses = [10.9 - 0.3 * step + 0.01 * ranks for step in range(8)] if stage == pp - 1 else []
        rows.append(
            {"rank": rank, "stage": stage, "planned": planned, "measured": measured, "parts": parts}
            | {"seconds": [ms / 1e3] * 7, "losses": losses}
        )
    found = {"name": "study", "device": "NVIDIA H200", "gpu": "h200", "tokens": 64 * 1024, "bubble": 0.0}
    found |= {"ranks": rows, "tflops": 380.0, "product_tflops": 760.0, "share_of_product": 0.5, "out_of_memory": None}
    found["bubble"] = 0.5 if pp > 1 else 0.0
    return found | ({"profile": _profile(ranks, pp, ms, profile)} if profile else {})


def _profile(ranks: int, pp: int, ms: float, page: str) -> dict[str, Any]:
    """A recorded step, in which the stages of a pipeline take turns."""
    rows = []
    for rank in range(ranks):
        stage = rank * pp // ranks
        busy = [pp == 1 or stage * COLUMNS // pp <= column < (stage + 1) * COLUMNS // pp for column in range(COLUMNS)]
        strip = {"computing": [0.9 * one for one in busy], "exposed": [0.05 * one for one in busy]}
        strip |= {"host late": [0.0] * COLUMNS, "after a wait": [0.0] * COLUMNS}
        strip["dependency"] = [0.05 if one else 1.0 for one in busy]
        talks = {"kind": "all-reduce", "group": "TENSOR", "count": 72, "ms": 30.0, "exposed": 12.0, "megabytes": 900.0}
        kinds = {"matrix products": 0.6, "attention": 0.1, "element-wise": 0.15, "all-reduce": 0.07}
        rows.append(
            {"rank": rank, "span": ms, "busy": 0.95 / pp, "computing": 0.9 / pp, "communication": 0.08, "exposed": 0.03}
            | {"exposed_by": [talks], "strip": strip, "operations": [{"name": "aten::mm", "count": 9, "ms": 40.0}]}
            | {"kernels": [{"kind": one, "count": 9, "ms": ms * share, "share": share} for one, share in kinds.items()]}
        )
    return {"ranks": rows, "slowed": 1.02, "page": page}


def pieces(found: dict[str, Any], longest: int = 1 << 16) -> list[str]:
    """Lines that a trial prints, as they arrive: a long one in pieces."""
    text = json.dumps(found)
    return ["waits for nobody", *(text[at : at + longest] for at in range(0, len(text), longest))]
