"""Types of rows: rows of a source, canonical rows, and bad rows.

A canonical row is one of four dicts. Its content() identifies it for splits, duplicates and subsets:

    {"input": str, "output": str}                          a prompt and its answer
    {"messages": [{"role", "content", ...}, ...], "tools": [...]}    a conversation; the key tools is optional
    {"text": str}                                          for pretraining
    {"chosen": row, "rejected": row}                       two answers to one prompt, each a row of the first two kinds
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """Reason why a row cannot be used."""

    reason: str  # a few words that are the same for all rows with this fault, because rows are counted by reason
    field: str = ""  # the column or the place within the row
    shown: str = ""  # the value, or the parser's message


class Refused(Exception):
    """A row that cannot be used."""

    def __init__(self, bad: Bad):
        super().__init__(bad)
        self.bad = bad


@dataclass(frozen=True)
class Rows:
    """Rows of a chunk in the order of the source. A row that cannot be parsed is Bad."""

    values: list[Row | Bad]
    source: str  # the beginning of every place: "file.jsonl:", "file.parquet row "
    numbers: Sequence[int]  # of each row in the source: a line, or the row's number

    def place(self, row: int) -> str:
        """Return the place of a row, by its index here: "file.jsonl:17", "file.parquet row 17"."""
        return f"{self.source}{self.numbers[row]}"


def content(row: Row) -> bytes:
    if "input" in row:
        return f"{row['input']}\0{row['output']}".encode()
    if "text" in row:
        return row["text"].encode()
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=lambda other: f"a {type(other).__name__}")
    return text if len(text) <= 60 else f"{text[:60]}..."
