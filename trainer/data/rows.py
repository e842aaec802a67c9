"""Types that the files of this folder pass to one another: rows of a source, canonical rows, and rows that are bad.

A canonical row is one of four dicts; content() is what it is known by, for splits, duplicates and subsets:

    {"input": str, "output": str}                          a prompt and its answer
    {"messages": [{"role", "content", ...}, ...], "tools": [...]}    a conversation; tools only where there are some
    {"text": str}                                          for pretraining
    {"chosen": row, "rejected": row}                       two answers to one prompt, each a row of the first two kinds
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """Reason why a row cannot be used."""

    reason: str  # few words, the same for all rows with this fault: rows are counted by it
    field: str = ""  # the column or the place within the row
    shown: str = ""  # the value, or what the parser said


@dataclass(frozen=True)
class Rows:
    """Rows of a chunk as they lie in the source, in order. One that cannot be parsed is Bad."""

    values: list[Row | Bad]
    place: Callable[[int], str]  # of a row by its position here: "file.jsonl:17", "file.parquet row 17"


def content(row: Row) -> bytes:
    if "input" in row:
        return f"{row['input']}\0{row['output']}".encode()
    if "text" in row:
        return row["text"].encode()
    return json.dumps(row, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def show(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=lambda other: f"a {type(other).__name__}")
    return text if len(text) <= 60 else f"{text[:60]}..."
