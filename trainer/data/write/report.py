"""Report of preparation (report.json): rows read and written, reasons, lengths, similarity, learned tokens.

Equal data and settings give an identical report, because it contains no times.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from trainer.data.read.choose import SPLITS

SAMPLES = 5  # rows shown of each kind
BINS = 24
MOST = 0.9  # share of learned tokens without a warning
LEAST = 16  # the multiple at most layouts (conf/rules/layout.py)
FEW = 0.01  # share of rows left out, cut or similar without a warning


def count(totals: dict[str, Any], reason: str, rows: int, samples: list[Any], most: int) -> None:
    """Add rows to the count of a reason, which keeps the first `most` samples."""
    total = totals.setdefault(reason, {"count": 0, "samples": []})
    total["count"] += rows
    total["samples"] += samples[: most - len(total["samples"])]


def merged(facts: Iterable[dict[str, Any]], key: str) -> dict[str, Any]:
    """Sum counts by reason over all chunks, with the first samples."""
    totals: dict[str, Any] = {}
    for chunk in facts:
        for reason, entry in chunk[key].items():
            count(totals, reason, entry["count"], entry["samples"], SAMPLES)
    return dict(sorted(totals.items(), key=lambda item: (-item[1]["count"], item[0])))


def lengths(tokens: np.ndarray, learned: np.ndarray) -> dict[str, Any]:
    """Return statistics of the row lengths of one split."""
    if not len(tokens):
        return {"rows": 0, "tokens": 0, "learned": 0}
    edges = np.unique(np.geomspace(1, tokens.max() + 1, BINS + 1).astype(np.int64))
    counts, _ = np.histogram(tokens, np.append(edges[:-1], tokens.max() + 1))
    median, p95 = np.percentile(tokens, (50, 95), method="higher")
    return {
        "rows": len(tokens),
        "tokens": int(tokens.sum(dtype=np.int64)),
        "learned": int(learned.sum(dtype=np.int64)),
        "min": int(tokens.min()),
        "median": int(median),
        "p95": int(p95),
        "max": int(tokens.max()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def packing(tokens: np.ndarray, padded: np.ndarray, bounds: np.ndarray, capacity: int, multiple: int) -> dict[str, Any]:
    sequences, used = len(bounds) - 1, float(tokens.sum(dtype=np.int64) - len(tokens))
    return {
        "sequences": sequences,
        "rows": len(tokens),
        "efficiency": round(used / (sequences * capacity), 4),
        "padding": round((float(padded.sum(dtype=np.int64)) - used) / (sequences * capacity), 4),
        "multiple": multiple,
        "rows_per_sequence": round(len(tokens) / sequences, 2),
    }


def warnings(report: dict[str, Any]) -> list[str]:
    """Return warnings that a person should read before paying for a training run."""
    lines = []
    read = max(1, report["rows"]["read"])
    for reason, entry in report["dropped"].items():
        if entry["count"] / read > FEW:
            lines.append(f"{entry['count'] / read:.1%} of the rows were left out: {reason}")
    if report["truncated"]["share"] > FEW:
        lines.append(f"{report['truncated']['share']:.1%} of the rows had their prompt cut")
    if report["overlap"]["exact"]:
        lines.append(f"{report['overlap']['exact']} held-out rows have a prompt that is also in training")
    if report["overlap"]["near"]:
        lines.append(f"{report['overlap']['near']} rows are nearly a row of another split")
    kept = max(1, report["rows"]["kept"])
    for name, kind in (("copies of another", "exact"), ("nearly another", "near")):
        if report["duplicates"][kind] / kept > FEW:
            lines.append(f"{report['duplicates'][kind] / kept:.1%} of the rows are {name}")
    for name, entry in report["anomalies"].items():
        lines.append(f"{entry['count']} rows: {name}, such as {entry['samples'][0]}")
    if (
        report["template"]["kind"] != "text"
        and report["template"]["loss_on"] != "all"
        and report["learned_share"] > MOST
    ):
        lines.append(
            f"{report['learned_share']:.0%} of the tokens are learned: are prompts among them? See the example"
        )
    for name in SPLITS:
        entry = report.get("packing", {}).get(name)
        if entry and entry["efficiency"] < 0.8 and entry["sequences"] > 1:
            lines.append(_half_full(name, entry, report["tokens"][name]["tokens"] / entry["rows"]))
    return lines


def _half_full(name: str, entry: dict[str, Any], mean: float) -> str:
    """Return a warning about packed sequences that are not full: the cause, and a change to make."""
    padding, multiple = entry["padding"], entry["multiple"]
    room = 1 - entry["efficiency"] - padding
    text = f"packed sequences of {name} are only {entry['efficiency']:.0%} full: {padding:.0%} pads each row "
    text += f"(about {mean:.0f} tokens) to a multiple of {multiple}, {room:.0%} is too small for any row; "
    if room > padding:
        return f"{text}another data.seq_length leaves less, for example twice as long"
    layout = ", or a smaller layout.cp or layout.tp" if multiple > LEAST else ""
    return f"{text}joining several short rows into one needs less padding{layout}"
