"""The form of a deployment in Prefect's UI, with the values that its configuration has now beside each key.

A description is all that Prefect's form shows of a key. A value in the field itself would be sent with each run, and
would outlive a change of the configuration.
"""

import copy
import json
from typing import Any

from conf.overrides import CHANGEABLE, marked
from conf.schema.run import Run

SHOWN = 80  # characters of a value


def with_values(schema: dict[str, Any], run: Run) -> dict[str, Any]:
    """The schema of a deployment's parameters, whose descriptions say what the run has."""
    found, values = copy.deepcopy(schema), run.model_dump(mode="json")
    definitions = found.get("definitions", {})
    for section, kind in CHANGEABLE.items():
        for key, entry in definitions.get(kind.__name__, {}).get("properties", {}).items():
            entry["description"] = f"{entry.get('description', '')}{_said(run.name, values[section][key])}".strip()
    return found


def _said(name: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    shown = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
    return f" \N{EM DASH} in {marked(name)}: {marked(shown)}"
