"""Documented keys of a run: a table for people, a JSON schema for editors. conf/schema/__main__.py is the command."""

import itertools
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from conf.schema.run import Run, sections

EXTENDS = {
    "type": "string",
    "default": None,
    "description": "the configuration whose keys this file takes: a name in conf/, or a file relative to this one",
}


def json_schema() -> str:
    """The schema for editors. A file that extends another one may leave out required keys, except for its name."""
    schema = Run.model_json_schema()
    required = {"required": schema.pop("required"), "properties": {}}
    for section, kind in sections().items():
        if keys := schema["$defs"][kind.__name__].pop("required", None):
            required["properties"][section] = {"required": keys}
    schema["properties"] = {"extends": {"title": "Extends", **EXTENDS}} | schema["properties"]
    schema |= {"required": ["name"], "if": {"required": ["extends"]}, "else": required}
    return json.dumps(schema, indent=2) + "\n"


def table(width: int) -> Iterator[str]:
    """Lines of the documented schema, folded to `width` where that leaves room for the meaning."""
    rows = [("KEY", "TYPE", "DEFAULT", "CHOICES OR LIMITS", "MEANING")]
    rows += [_row("extends", EXTENDS), _row("name", Run.model_json_schema()["properties"]["name"])]
    for section, kind in sections().items():
        rows += [_row(f"{section}.{key}", field) for key, field in kind.model_json_schema()["properties"].items()]
    widths = [min(most, max(len(row[column]) for row in rows)) for column, most in enumerate((32, 20, 32, 32))]
    widths.append(max(40, width - sum(widths) - 2 * len(widths)))
    for row in rows:
        cells = [textwrap.wrap(text, size) for text, size in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield "  ".join(text.ljust(size) for text, size in zip(line, widths, strict=True)).rstrip()


def markdown() -> str:
    """Return docs/reference/keys.md: a table of the keys of each section."""
    parts = ["# Keys\n\nAll keys of a configuration. `make schema` writes this page.\n"]
    for section, kind in sections().items():
        rows = [_row(key, field) for key, field in kind.model_json_schema()["properties"].items()]
        cells = [(f"`{key}`", type_, f"`{value}`", meaning) for key, type_, value, _, meaning in rows]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
        table = "\n".join(f"| {line} |" for line in ("key | type | default | meaning", "--- | --- | --- | ---", *lines))
        parts.append(f"## {section}\n\n{table}\n")
    return "\n".join(parts)


def _row(key: str, field: dict[str, Any]) -> tuple[str, str, str, str, str]:
    alternatives = field.get("anyOf", [field])
    kind = " or ".join(alternative["type"] for alternative in alternatives)
    value = alternatives[0].get("items", alternatives[0])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matches"}
    limits = value.get("enum") or [f"{sign} {value[limit]}" for limit, sign in signs.items() if limit in value]
    default = json.dumps(field["default"]) if "default" in field else "(required)"
    return key, kind, default, ", ".join(limits), field["description"]
