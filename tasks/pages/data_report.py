"""Page, tables of samples and figures of the report of preparation (report.json, by trainer/data/write/report.py).

The page has no section for parts that the report lacks, such as packing.
"""

from typing import Any

from tasks.pages.markdown import code, fenced, table, words

SPLITS = ("training", "validation", "test")
EXAMPLE = 4000  # shown characters of the example
SAMPLES = 5  # shown samples of each kind
BAR = 40  # characters of the longest bar

Report = dict[str, Any]


def numbers(report: Report) -> dict[str, Any]:
    """The most important figures, for MLflow."""
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
    """Samples of dropped rows, of anomalies and of similar rows, by the name of the table."""
    samples = {
        "left_out": [
            {"reason": reason, "rows": entry["count"], **sample}
            for reason, entry in report["dropped"].items()
            for sample in entry["samples"]
        ],
        "anomalies": [
            {"anomaly": name, "rows": entry["count"], **_sample(sample)}
            for name, entry in report.get("anomalies", {}).items()
            for sample in entry["samples"]
        ],
    }
    samples["alike"] = [entry for entries in report.get("alike", {}).get("samples", {}).values() for entry in entries]
    return {name: rows for name, rows in samples.items() if rows}


def headline(report: Report) -> str:
    rows, tokens = report["rows"], report["tokens"]
    splits = ", ".join(f"{rows[name]:,} {name}" for name in SPLITS)
    total, learned = (sum(entry[key] for entry in tokens.values()) for key in ("tokens", "learned"))
    share = f"{learned / total:.1%} of them learned" if total else "none"
    return f"{rows['kept']:,} of {rows['read']:,} rows: {splits}; {total:,} tokens, {share}"


def page(report: Report, title: str, files: str = "") -> str:
    """The report in Markdown. `files` is the location of the artifact's files."""
    text = [f"# {words(title)}", "", f"{words(headline(report))}."]
    if warnings := report.get("warnings"):
        text += ["", "**Worth a look:**", "", *(f"- {words(line)}" for line in warnings)]
    text += ["", "## Sources", *_sources(report)]
    text += _left_out_section(report)
    text += ["", "## Tokens", *_tokens(report), *_packing(report), "", *_checks(report)]
    text += _alike(report.get("alike"), files) + _anomalies(report)
    text += ["", "## Template", *_template(report["template"]), *_example(report.get("example"))]
    return "\n".join(text) + "\n"


def _sources(report: Report) -> list[str]:
    return table(
        ("source", "read as", "why", "rows"),
        [
            (code(entry["source"], 120), words(entry["shape"]), words(entry["reason"]), f"{entry['rows']:,}")
            for entry in report["sources"]
        ],
    )


def _left_out_section(report: Report) -> list[str]:
    not_chosen = report["rows"].get("not_chosen", 0)
    if not _left_out(report) and not not_chosen:
        return []
    rows = [
        (words(reason), f"{entry['count']:,}", "<br>".join(_place(sample) for sample in entry["samples"][:SAMPLES]))
        for reason, entry in report["dropped"].items()
    ]
    if not_chosen:
        rows.append(("not chosen, by data.rows or by weight", f"{not_chosen:,}", ""))
    return ["", "## Left out", *table(("reason", "rows", "such as"), rows)]


def _tokens(report: Report) -> list[str]:
    keys = ("rows", "tokens", "learned", "min", "median", "p95", "max")
    rows = [
        (name, *(f"{entry[key]:,}" if key in entry else "" for key in keys))
        for name in SPLITS
        if (entry := report["tokens"].get(name))
    ]
    text = table(("split", *keys), rows)
    if bars := histogram(report["tokens"].get("training", {}).get("histogram")):
        text += ["", "Tokens of a row, training:", "", fenced("\n".join(bars))]
    return text


def histogram(bins: dict[str, list[int]] | None) -> list[str]:
    """Lines of a histogram, one for each bin from the first to the last nonempty bin."""
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


def _packing(report: Report) -> list[str]:
    rows = [
        (name, f"{entry['sequences']:,}", f"{entry['rows_per_sequence']:.1f}", f"{entry['efficiency']:.1%}")
        for name in SPLITS
        if (entry := report.get("packing", {}).get(name))
    ]
    return table(("packed", "sequences", "rows in each", "filled with tokens"), rows)


def _checks(report: Report) -> list[str]:
    text = []
    if "learned_share" in report:
        text.append(f"- learned: {report['learned_share']:.1%} of the tokens")
    if cut := report.get("truncated"):
        text.append(f"- prompt cut: {cut['rows']:,} rows ({cut['share']:.1%}), by {cut['tokens_cut']:,} tokens in all")
    if like := report.get("duplicates"):
        text.append(f"- duplicates: {like['exact']:,} exact, {like['near']:,} near")
    if overlap := report.get("overlap"):
        text.append(f"- held-out rows like a training row: {overlap['exact']:,} exactly, {overlap['near']:,} nearly")
    if report.get("tokens_per_second"):
        text.append(f"- speed: {report['tokens_per_second']:,.0f} tokens/s")
    return text


def _alike(alike: dict[str, Any] | None, files: str) -> list[str]:
    """Leaks first, then copies and near copies, by file and line."""
    if not alike:
        return []
    total = ", ".join(f"{words(kind)} {count:,}" for kind, count in alike["counts"].items() if count)
    rows = []
    for kind in alike["counts"]:
        for entry in alike["samples"].get(kind, [])[:SAMPLES]:
            row, other = code(entry["row"], 120), code(entry["like"], 120)
            rows.append((words(kind), row, entry["split"], other, entry["of"], words(entry["by"])))
    line = f"Rows that are like another row: {total}. All of them: {code(f'{files}/{alike["file"]}', 300)}."
    text = ["", "## Copies and leaks", "", line, *table(("kind", "row", "in", "is like", "in", "by"), rows)]
    return [*text, "", "To remove them, set data.leaks, data.near_copies and data.duplicates to drop."]


def _anomalies(report: Report) -> list[str]:
    rows = [
        (words(name), f"{entry['count']:,}", "<br>".join(_place(_sample(s)) for s in entry["samples"][:SAMPLES]))
        for name, entry in report.get("anomalies", {}).items()
    ]
    return ["", "## Odd rows", *table(("anomaly", "rows", "such as"), rows)] if rows else []


def _template(record: dict[str, Any]) -> list[str]:
    known = {key: str(value) for key, value in record.items() if key != "text" and value not in (None, {}, [])}
    text = table(("", ""), [(code(key), code(value, 120)) for key, value in known.items() if len(value) <= 120])
    return [*text, "", fenced(record["text"])] if record.get("text") else text


def _example(example: dict[str, Any] | None) -> list[str]:
    """One row as the model reads it."""
    if not example:
        return []
    text = example.get("marked")
    if text is None:
        text, learned = example["text"], example.get("learned", [])
        for start, end in reversed(learned):
            text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
    shown = text if len(text) <= EXAMPLE else f"{text[: EXAMPLE // 2]}\n[...]\n{text[-EXAMPLE // 2 :]}"
    return ["", "## Example", "", "The text in ⟦ ⟧ is learned.", "", fenced(shown)]


def _left_out(report: Report) -> int:
    return sum(entry["count"] for entry in report["dropped"].values())


def _place(sample: dict[str, Any]) -> str:
    """Place of a row, and its problem."""
    return " ".join(filter(None, (code(str(sample.get(key) or ""), 120) for key in ("place", "field", "shown"))))


def _sample(sample: Any) -> dict[str, Any]:
    return sample if isinstance(sample, dict) else {"place": str(sample)}
