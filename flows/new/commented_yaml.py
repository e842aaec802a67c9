"""Choices as YAML with comments: each reason follows its value, or stands above it if the line would be too long."""

from collections.abc import Iterable
from functools import partial
from textwrap import wrap
from typing import Any

import yaml

from conf.schema.run import Run
from conf.strict_yaml import Dumper
from flows.new.choices import Choices

WIDTH = 120  # of a line with its comment; a longer comment stands above its key
folded = partial(wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)
SCHEMA = "# yaml-language-server: $schema="


def text(found: Choices, head: Iterable[str], schema: str) -> str:
    """Return the YAML of all choices in the schema's order. `schema` is the path for editors; "" omits it."""
    lines = [SCHEMA + schema] if schema else []
    lines += [f"# {_line(one)}".rstrip() for one in head]
    for section in Run.model_fields:
        keys = [key for key in found.made if key.partition(".")[0] == section]
        if not keys:
            continue
        if section != "name":
            lines += ["", f"{section}:"]
        for key in keys:
            choice = found.made[key]
            lines += _entry(key.rpartition(".")[2], choice.value, choice.why, "" if section == "name" else "  ")
    return "\n".join(lines) + "\n"


def _entry(key: str, value: Any, why: str, indent: str) -> list[str]:
    entry, why = f"{indent}{key}: {in_line(value)}", _line(why)
    if not why:
        return [entry]
    if len(entry) + len(why) + 3 <= WIDTH:
        return [f"{entry} # {why}"]
    start = f"{indent}# "
    return [*folded(why, initial_indent=start, subsequent_indent=start), entry]


def in_line(value: Any) -> str:
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value and not value.is_integer() else repr(value)
    dumped = yaml.dump([value], Dumper=Dumper, default_flow_style=True, width=10**6, allow_unicode=True)
    return dumped.strip()[1:-1]


def _line(words: str) -> str:
    """Return the words as one line, so that they stay inside a comment."""
    return "".join(letter if letter.isprintable() else " " for letter in words).strip()
