"""Pydantic's errors as lines for the user: the key, the value and the remedy."""

import json
from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

from conf import strict_yaml

LONGEST = 300  # characters of a value in a message
TEXTS: dict[str, str] = strict_yaml.table("error_texts")


def reported(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors to report. A list with invalid entries is not reported as too short as well."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(len(loc) > len(detail["loc"]) and loc[: len(detail["loc"])] == detail["loc"] for loc in places)
    ]


def key_of(detail: ErrorDetails) -> str:
    """Return the dotted key of an error, with the index in a list of sections: data.mixture[1].weight."""
    loc, key = detail["loc"], ""
    for at, part in enumerate(loc):
        if isinstance(part, str) or detail["type"] == "invalid_key":
            key += f".{part}" if key else str(part)
        elif key and any(isinstance(inner, str) for inner in loc[at:]):
            key += f"[{part}]"
    return key


def line(detail: ErrorDetails, meant: Callable[[str], str]) -> str:
    """Return the line of one error. For an unknown key, `meant` returns the keys that the user probably meant."""
    key, kind, value = key_of(detail), detail["type"], detail["input"]
    if kind in ("extra_forbidden", "invalid_key"):
        text = f"unknown key{meant(key)}"
    elif kind == "missing":
        text = "required, and missing"
    elif kind in TEXTS:
        limits = {name: _short(limit) for name, limit in detail.get("ctx", {}).items()}
        text = f"{show(value)} {TEXTS[kind].format(**limits)}"
        if kind == "string_type" and isinstance(value, int | float):
            text += "; quote it to make it one"
    else:
        text = f"{show(value)}: {detail['msg']}"
    return f"{key}: {text}"


def _short(limit: Any) -> Any:
    """Return a limit for a message: 0 for 0.0, as pydantic's limits of numbers are floats."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
