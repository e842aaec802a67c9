"""Page, sample tables and figures for the report of stage prepare (report.json, by trainer/data/write/report.py).

The page has no section for parts that the report lacks, such as packing.
"""

from typing import Any

from tasks.pages.markdown import PAGES, code, render

SPLITS = ("training", "validation", "test")
EXAMPLE = 4000  # shown characters of the example
BAR = 40  # characters of the longest bar

Report = dict[str, Any]


def numbers(report: Report) -> dict[str, Any]:
    """Return the most important figures, for MLflow."""
    rows, tokens = report["rows"], report["tokens"]
    packing = report.get("packing", {}).get("training", {})
    figures = {
        "rows_read": rows["read"],
        "rows_kept": rows["kept"],
        "rows_left_out": _left_out(report),
        "tokens": {name: tokens[name]["tokens"] for name in SPLITS if name in tokens},
        "tokens_training": tokens.get("training", {}).get("tokens"),
        "longest_row": max((entry.get("max", 0) for entry in tokens.values()), default=None),
        "learned_share": report.get("learned_share"),
        "truncated_share": report.get("truncated", {}).get("share"),
        "packing_efficiency": packing.get("efficiency"),
        "rows_per_sequence": packing.get("rows_per_sequence"),
        "duplicates_exact": report.get("duplicates", {}).get("exact"),
        "duplicates_near": report.get("duplicates", {}).get("near"),
        "overlap_exact": report.get("overlap", {}).get("exact"),
        "overlap_near": report.get("overlap", {}).get("near"),
        "anomalies": sum(entry["count"] for entry in report.get("anomalies", {}).values()),
        "tokens_per_second": report.get("tokens_per_second"),
    }
    return {key: value for key, value in figures.items() if value is not None}


def tables(report: Report) -> dict[str, list[dict[str, Any]]]:
    """Return tables by name: samples of dropped rows, of anomalies and of similar rows."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for key, table, column in (("dropped", "left_out", "reason"), ("anomalies", "anomalies", "anomaly")):
        entries = [(name, entry, sample) for name, entry in report.get(key, {}).items() for sample in entry["samples"]]
        samples[table] = [{column: name, "rows": entry["count"], **_sample(row)} for name, entry, row in entries]
    samples["alike"] = [entry for entries in report.get("alike", {}).get("samples", {}).values() for entry in entries]
    return {name: rows for name, rows in samples.items() if rows}


def headline(report: Report) -> str:
    rows, tokens = report["rows"], report["tokens"]
    splits = ", ".join(f"{rows[name]:,} {name}" for name in SPLITS)
    total, learned = (sum(entry[key] for entry in tokens.values()) for key in ("tokens", "learned"))
    share = f"{learned / total:.1%} of them learned" if total else "none"
    return f"{rows['kept']:,} of {rows['read']:,} rows: {splits}; {total:,} tokens, {share}"


def page(report: Report, title: str, files: str = "") -> str:
    """Return the report in Markdown. `files` is the location of the artifact's files."""
    record = {
        key: str(value) for key, value in report["template"].items() if key != "text" and value not in (None, {}, [])
    }
    return render(
        "data_report",
        report=report,
        title=title,
        files=files,
        headline=headline(report),
        splits=SPLITS,
        left_out=_left_out(report),
        bars=histogram(report["tokens"].get("training", {}).get("histogram")),
        template={key: value for key, value in record.items() if len(value) <= 120},
        example=_example(report.get("example")),
    )


def histogram(bins: dict[str, list[int]] | None) -> list[str]:
    """Return the lines of a histogram, one for each bin from the first to the last nonempty bin."""
    if not bins or not any(bins["counts"]):
        return []
    edges, counts = bins["edges"], bins["counts"]
    filled = [number for number, count in enumerate(counts) if count]
    width, most = len(f"{edges[-1] - 1:,}"), max(counts)
    lines = []
    for number in range(filled[0], filled[-1] + 1):
        bar = "#" * max(round(BAR * counts[number] / most), 1 if counts[number] else 0)
        span = f"{edges[number]:>{width},} - {edges[number + 1] - 1:>{width},}"
        lines.append(f"{span} | {bar:<{BAR}} {counts[number]:,}")
    return lines


def _example(example: dict[str, Any] | None) -> str:
    """Return one row as the model reads it, with marks around learned text."""
    if not example:
        return ""
    text = example.get("marked")
    if text is None:
        text, learned = example["text"], example.get("learned", [])
        for start, end in reversed(learned):
            text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    return text if len(text) <= EXAMPLE else f"{text[: EXAMPLE // 2]}\n[...]\n{text[-EXAMPLE // 2 :]}"


def _left_out(report: Report) -> int:
    return sum(entry["count"] for entry in report["dropped"].values())


def _place(sample: dict[str, Any] | str) -> str:
    """Return the place of a row and its problem."""
    found = _sample(sample)
    return " ".join(filter(None, (code(str(found.get(key) or ""), 120) for key in ("place", "field", "shown"))))


def _sample(sample: Any) -> dict[str, Any]:
    return sample if isinstance(sample, dict) else {"place": str(sample)}


PAGES.filters |= {"place": _place, "figure": lambda column, entry: f"{entry[column]:,}" if column in entry else ""}
