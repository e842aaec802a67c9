"""Checks of a user's own rewards before anything runs, since a reward is first called after hours of training.

    place("rewards.py:mine")    -> path and name         the file may be missing
    function("rewards.py:mine") -> name and source       the file must be Python and define the name
    judge_prompt("judge.txt")   -> text                  prompt of a judge, with a place for the answer
    regex(text), schema(text)                            from a pattern, or from a row's answer

A Fault has the reason, without the key.
"""

import ast
import json
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from contract import regular_files
from contract.faults import Fault, named

CALLED_WITH = {"function": ("prompt", "answer", "reference"), "environment": ("prompt", "answers", "reference")}
BINDS_BY_ITSELF = {"exec", "globals", "setattr", "vars", "locals"}  # may define names invisibly


def place(text: str) -> tuple[str, str]:
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise Fault(f"{text}: must be PATH.py:NAME")
    return path, name


def function(named: str, called_with: Sequence[str] = ()) -> tuple[str, str]:
    """Return the name and the source of its file, which is not run.

    If the function is defined directly in the file, it must accept its keyword arguments.
    """
    path, name = place(named)
    source = _text(path).removeprefix("\ufeff")  # some editors begin files with a BOM, which Python accepts
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes in strings
            tree = ast.parse(source, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise Fault(f"{path}: no Python: {reason}{line}") from None
    bound, used = Counter[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Name):
            bound[node.id] += 1
        elif isinstance(node, ast.alias):
            bound[(node.asname or node.name).split(".")[0]] += 1
    all_seen = "*" not in bound and not used & BINDS_BY_ITSELF
    if name not in bound and all_seen:
        raise Fault(f"{path}: there is no {name} in it")
    if bound[name] == 1 and all_seen:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name and not node.decorator_list:
                _require_fit(path, name, node.args, called_with)
    return name, source


def _require_fit(path: str, name: str, takes: ast.arguments, called_with: Sequence[str]) -> None:
    """Raise a Fault if a call with these keyword arguments would raise TypeError."""
    if not called_with:
        return
    by_place, by_name = [*takes.posonlyargs, *takes.args], {each.arg for each in (*takes.args, *takes.kwonlyargs)}
    needed = by_place[: len(by_place) - len(takes.defaults)]
    needed += [name for name, value in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if value is None]
    unknown = [] if takes.kwarg else [name for name in called_with if name not in by_name]
    missing = [each.arg for each in needed if each.arg not in by_name.intersection(called_with)]
    if unknown or missing:
        wrong = f"takes no {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)} as well"
        call = ", ".join(f"{argument}=..." for argument in called_with)
        raise Fault(f"{path}: {name} {wrong}; it is called as {name}({call})")


def judge_prompt(path: str) -> str:
    text = _text(path)
    if "{answer}" not in text:
        raise Fault(f"{path}: has no {{answer}}: the judge would not see it")
    return text


def judge_address(address: str) -> None:
    if "@" in address:
        raise Fault("has a user or a password in it; JUDGE_API_KEY is sent if it is set")
    with named(address, ValueError):
        host, _ = urlsplit(address).hostname, urlsplit(address).port
    if not host or not address.isprintable() or " " in address:
        raise Fault(f"{address!r}: no address of a server, such as http://HOST:8000/v1")


@lru_cache(1024)
def regex(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Fault(f"{pattern[:60]!r} is not a regular expression: {error}") from None


@lru_cache(1024)
def schema(text: str) -> Any:
    """Return the validator of a JSON schema."""
    import jsonschema
    from jsonschema import validators

    try:
        content = json.loads(text)
        if not isinstance(content, dict) or not isinstance(content.get("$schema", ""), str):
            raise ValueError("it must be an object, and its $schema a text")
        kind = validators.validator_for(content)
        kind.check_schema(content)
        return kind(content)
    except (ValueError, RecursionError, jsonschema.SchemaError) as error:
        first = str(error).splitlines()[0]
        raise Fault(f"{text[:60]!r} is not a JSON schema: {first}") from None


def _text(path: str) -> str:
    try:
        return regular_files.read(Path(path).expanduser()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Fault(f"{path}: no UTF-8: {error.reason} at byte {error.start}") from None
