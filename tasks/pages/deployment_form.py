"""The form of a deployment in Prefect's UI: a few fields, and one for all other keys, with the configuration's values.

That field accepts lines of KEY=VALUE; its other tab has every key. The form shows the configuration's values in the
keys' descriptions. A value in the field itself would be sent with each run, also after a change of the configuration.
"""

import copy
import json
from typing import Any

from conf.overrides import CHANGEABLE, SHORT, marked, plain
from conf.schema.run import Run

SHOWN = 80  # characters of a value
CHANGES = {"$ref": "#/definitions/Changes"}


def with_values(schema: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return the schema of a deployment's parameters, with the run's values in the descriptions."""
    form, values = copy.deepcopy(schema), run.model_dump(mode="json")
    properties, definitions = form["properties"], form.get("definitions", {})
    for section, kind in CHANGEABLE.items():
        for key, entry in definitions.get(kind.__name__, {}).get("properties", {}).items():
            entry["description"] = f"{entry.get('description', '')}{_value(run.name, values[section][key])}".strip()
    for name, entry in properties.items():
        plain(entry)
        entry["title"] = name.replace("_", " ")
        if name in SHORT:
            section, _, key = SHORT[name].partition(".")
            entry |= _limits(definitions[CHANGEABLE[section].__name__]["properties"][key])
            if (value := values[section][key]) is not None:
                entry["description"] = entry["description"].rstrip(".") + _value(run.name, value)
    properties["changes"]["title"] = "other keys"
    properties["changes"]["anyOf"] = [{"type": "string", "title": "key=value"}, CHANGES]
    definitions["Changes"]["title"] = "every key"
    # Errors of an alternative have no reason. This adds a second error, at the key.
    chosen = {"properties": {"changes": {"type": "object"}}, "required": ["changes"]}
    return form | {"if": chosen, "then": {"properties": {"changes": CHANGES}}}


def _limits(key: dict[str, Any]) -> dict[str, Any]:
    """Return the limits of a key's value, or of its text if the key may also be a section."""
    kind = next((kind for kind in key.get("anyOf", ()) if kind.get("type") == "string"), key)
    return {name: value for name, value in kind.items() if name not in ("title", "description")}


def _value(name: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    shown = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
    return f" \N{EM DASH} in {marked(name)}: {marked(shown)}"
