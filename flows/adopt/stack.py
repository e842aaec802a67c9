"""Types of the import: a source that was read, and a stack with its table of keys."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

# Our key such as optimizer.lr, or a concept of flows/adopt/concepts.py such as accumulation; with a function if the
# value must be converted.
Target = str | tuple[str, Callable[[Any], Any]]

HELD_OUT = "data.test: rows are held out for the evaluation here; data.test: 0 trains on them too"  # a difference


class NoCounterpartError(Exception):
    """A key or value that has no counterpart here, with the reason."""


@dataclass
class Source:
    """A configuration in its own words: the dotted keys of a YAML file, of a command, or of a Python script."""

    kind: str  # yaml, command, python or document
    keys: dict[str, Any]
    place: str  # for messages, such as "line 12"
    words: tuple[str, ...] = ()  # the command before its options, or the names that a script imports
    environment: dict[str, str] = field(default_factory=dict)  # variables that the script sets
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stack:
    name: str
    title: str
    kinds: tuple[str, ...]
    recognises: Callable[[Source], int]  # 0: not this stack; the highest number wins
    keys: Mapping[str, Target]
    left_out: Mapping[str, str]  # patterns of keys, with the reason
    defaults: Mapping[str, Any]  # values that the stack uses if a file does not set the key
    differences: tuple[str, ...] = ()  # sentences that hold for each file
    extends: str = ""  # a configuration in conf/ that has the training; only keys that differ are written
    spelled: Callable[[str], str] = str  # the key of the table for a key of a file
    defaults_of: Callable[[Source], Mapping[str, Any]] = lambda _: {}  # those that depend on keys or the command

    def reason(self, key: str) -> str | None:
        return next((why for pattern, why in self.left_out.items() if fnmatchcase(key, pattern)), None)


def refuse(why: str) -> Callable[[Any], Any]:
    """Return a conversion that has no counterpart for any value."""

    def convert(_: Any) -> Any:
        raise NoCounterpartError(why)

    return convert


def underscored(key: str) -> str:
    return key.replace("-", "_")


def unnumbered(key: str) -> str:
    """Return a key such as datasets[].path for datasets[0].path."""
    return re.sub(r"\[\d+\]", "[]", key)


def marks(source: Source, *names: str) -> int:
    """Return how many of these keys the source has."""
    return sum(name in source.keys for name in names)


def command(source: Source, *parts: str) -> int:
    """Return 20 if one of these texts is in the command, else 0."""
    text = " ".join(source.words)
    return 20 * any(part in text for part in parts)
