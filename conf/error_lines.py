"""Lines that tell pydantic's errors to whoever wrote the file: the key, the value, and what would be right."""

import json
from collections.abc import Callable
from typing import Any

from pydantic_core import ErrorDetails

LONGEST = 300  # characters of a value in a message

# What pydantic's kinds of errors are called here; the value goes in front. Any other kind keeps pydantic's words.
WORDS = {
    "int_type": "is not an integer",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "string_type": "is not a string",
    "bool_type": "is not true or false",
    "tuple_type": "is not a list",
    "model_type": "is not a section of keys",
    "literal_error": "is not one of {expected}",
    "string_pattern_mismatch": "does not match {pattern}",
    "string_too_short": "is empty",
    "too_short": "is too short: it must have at least {min_length}",
    "string_too_long": "is too long: it must have at most {max_length} characters",
    "greater_than": "is too small: it must be above {gt}",
    "greater_than_equal": "is too small: it must be at least {ge}",
    "less_than": "is too large: it must be below {lt}",
    "less_than_equal": "is too large: it must be at most {le}",
}


def told(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Errors that are worth a line: a list is not too short besides, for the entries in it that are wrong."""
    places = [detail["loc"] for detail in details]
    return [
        detail
        for detail in details
        if detail["type"] != "too_short"
        or not any(len(loc) > len(detail["loc"]) and loc[: len(detail["loc"])] == detail["loc"] for loc in places)
    ]


def key_of(detail: ErrorDetails) -> str:
    """Dotted key of an error. A place in a list is named where sections lie in it: data.mixture[1].weight."""
    loc, key = detail["loc"], ""
    for at, part in enumerate(loc):
        if isinstance(part, str) or detail["type"] == "invalid_key":
            key += f".{part}" if key else str(part)
        elif key and any(isinstance(inner, str) for inner in loc[at:]):
            key += f"[{part}]"
    return key


def line(detail: ErrorDetails, meant: Callable[[str], str]) -> str:
    """Line of one error. `meant` names, for an unknown key, the keys that were probably meant."""
    key, kind, value = key_of(detail), detail["type"], detail["input"]
    if kind in ("extra_forbidden", "invalid_key"):
        text = f"unknown key{meant(key)}"
    elif kind == "missing":
        text = "required, and missing"
    elif kind in WORDS:
        limits = {name: _short(limit) for name, limit in detail.get("ctx", {}).items()}
        text = f"{show(value)} {WORDS[kind].format(**limits)}"
        if kind == "string_type" and isinstance(value, int | float):
            text += "; quote it to make it one"
    else:
        text = f"{show(value)}: {detail['msg']}"
    return f"{key}: {text}"


def _short(limit: Any) -> Any:
    """A limit as text: 0 for 0.0, which is what a limit of a number with a fraction is to pydantic."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
