"""Print a run's keys, for people or for editors.

    python -m conf.schema            a table of all keys
    python -m conf.schema --json     the JSON schema, which editors use to complete and check conf/*.yaml

The table is as wide as the terminal; make schema writes conf/schema.json.
"""

import argparse
import itertools
import json
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from conf.schema.run import Run, sections
from contract import closed_pipe

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
    """Lines of the documented schema, folded to `width` if that leaves room for the meaning."""
    rows = [("KEY", "TYPE", "DEFAULT", "CHOICES OR LIMITS", "MEANING")]
    rows += [described("extends", EXTENDS), described("name", Run.model_json_schema()["properties"]["name"])]
    for section, kind in sections().items():
        rows += [described(f"{section}.{key}", field) for key, field in kind.model_json_schema()["properties"].items()]
    widths = [min(most, max(len(row[column]) for row in rows)) for column, most in enumerate((32, 20, 32, 32))]
    widths.append(max(40, width - sum(widths) - 2 * len(widths)))
    for row in rows:
        cells = [textwrap.wrap(text, size) for text, size in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield "  ".join(text.ljust(size) for text, size in zip(line, widths, strict=True)).rstrip()


def described(key: str, field: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Return key, type, default, choices or limits, and meaning."""
    alternatives = field.get("anyOf", [field])
    kind = " or ".join(alternative["type"] for alternative in alternatives)
    value = alternatives[0].get("items", alternatives[0])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matches"}
    limits = value.get("enum") or [f"{sign} {value[limit]}" for limit, sign in signs.items() if limit in value]
    default = json.dumps(field["default"]) if "default" in field else "(required)"
    return key, kind, default, ", ".join(limits), field["description"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conf.schema", description="Print the keys of a run's YAML.")
    parser.add_argument("--json", action="store_true", help="print the JSON schema instead of a table")
    if parser.parse_args().json:
        print(json_schema(), end="")
    else:
        print("\n".join(table(shutil.get_terminal_size((160, 50)).columns)))


if __name__ == "__main__":
    closed_pipe.run(main)
