"""Strict reader of a JSON object; everything else is a Fault of one line.

Python's reader also accepts NaN and Infinity, repeated keys and halves of surrogate pairs. Other libraries that read
the same file may refuse it, or read other values. Infinity is read as the object that transformers writes for it.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from contract import regular_files
from contract.faults import Fault

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _Refused(ValueError):
    """A value that is not valid JSON."""


def read(path: Path) -> dict[str, Any]:
    return parse(regular_files.read(path), str(path))


def read_or_empty(path: Path, first_line: bool = False) -> dict[str, Any]:
    """The JSON object in a file of this project, or in its first line; empty if the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.readline() if first_line else file.read())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def parse(content: bytes, shown: str) -> dict[str, Any]:
    """Parse a JSON object. `shown` names the file in a Fault."""
    try:
        text = content.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_number, parse_int=_integer
        )
        if SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise Fault(f"{shown}: not readable as JSON (its brackets are nested too deeply)") from None
    except UnicodeError:
        raise Fault(f"{shown}: not readable as JSON (its text is not UTF-8)") from None
    except ValueError as error:
        raise Fault(f"{shown}: not readable as JSON ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(value, dict):
        raise Fault(f"{shown}: contains {kind(value)}, not an object")
    return value


def kind(value: Any) -> str:
    """Return JSON's name for the type of a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def show(value: Any) -> str:
    """Return a value as a short text of one line, for a message."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        again = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _Refused(f"the key {show(again)} occurs twice")
    return values


def _constant(name: str) -> Any:
    if name == "Infinity":
        return {"__float__": name}  # as transformers writes it in config.json
    raise _Refused(f"{name} is not a JSON number")


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Refused(f"the number {text[:40]} is too large")
    return number


def _integer(text: str) -> int:
    if len(text) > 100:  # Python refuses thousands of digits, and no valid value is that large
        raise _Refused(f"the number {text[:20]}... is too large")
    return int(text)
