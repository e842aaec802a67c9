"""Typed changes to a named configuration: the keys that a form or a command line may set on top of conf/NAME.yaml.

Changes has the sections and keys of conf/schema/run.py, all of them optional, and derived from it.
"""

# pyright: reportArgumentType=false

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model

from conf.load import names, read_overrides
from conf.schema.run import sections

# A form offers the names; Python and the command line also accept a file.
Name = Annotated[str, WithJsonSchema({"type": "string", "enum": names()})]
# Keys that are parameters of a flow, as most runs set no others.
SHORT = {
    "model": "model.source",
    "data": "data.source",
    "learning_rate": "optimizer.lr",
    "epochs": "train.epochs",
    "rank": "adapter.rank",
}

CLOSED = ConfigDict(extra="forbid", allow_inf_nan=False)


def plain(schema: dict[str, Any]) -> None:
    """Remove null from a form's schema of a key, as a form omits keys without a value.

    A number is then a single field, and an invalid one is refused with its limit. As one of several alternatives it
    would be "not valid under any of the given schemas". A boolean keeps null, as an untouched switch would be sent as
    off.
    """
    if "description" in schema:
        schema["description"] = marked(" ".join(schema["description"].split()))
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if {"type": "boolean"} in kinds:
        return
    schema.pop("anyOf", None)
    schema.pop("default", None)
    if len(kinds) == 1:
        schema |= kinds[0]
    elif kinds:
        schema["anyOf"] = kinds


def marked(text: str) -> str:
    """A description with escapes for Markdown, in which forms show it."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


def _optional(kind: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for key, field in kind.model_fields.items():
        shown = Field(None, title=key, description=field.description, json_schema_extra=plain)
        fields[key] = (field.rebuild_annotation() | None, shown)
    return create_model(kind.__name__, __doc__=kind.__doc__, __config__=CLOSED, **fields)


# The flow sets all paths.
CHANGEABLE = {name: _optional(kind) for name, kind in sections().items() if name != "paths"}
Changes = create_model(  # pyright: ignore[reportCallIssue]
    "Changes",
    __doc__="Keys that differ from the named configuration.",
    __config__=CLOSED,
    **{
        name: (
            kind | None,
            Field(None, title=name, description=(kind.__doc__ or "").partition("\n")[0], json_schema_extra=plain),
        )
        for name, kind in CHANGEABLE.items()
    },
)


def as_overrides(changes: Any, **short: Any) -> list[str]:
    """Write each change as key=value, and then each parameter of `short` that is set.

    Changes may also be a text of such lines. In a form null means unset; in a dict of from_overrides() it is a value.
    """
    parameters = [f"{SHORT[name]}={json.dumps(value)}" for name, value in short.items() if value is not None]
    if isinstance(changes, str):
        return [*filter(None, map(str.strip, changes.splitlines())), *parameters]
    nested = changes.model_dump(mode="json", exclude_none=True) if isinstance(changes, BaseModel) else changes or {}
    values: dict[str, Any] = {}
    for name, value in nested.items():
        values |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return [*(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()), *parameters]


def from_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Values of valid key=value texts by section, parsed as in conf.load."""
    return by_section(read_overrides(overrides)[0])


def by_section(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of dotted keys by section and key."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    return nested
