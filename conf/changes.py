"""Changes to a named configuration, typed: what a form or a command line may say on top of conf/NAME.yaml.

Changes has the sections and keys of conf/schema.py, all of them optional; none is declared here again.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from conf.load import FOLDER
from conf.schema import sections

Name = Literal[*sorted(file.stem for file in FOLDER.glob("*.yaml"))]  # type: ignore[valid-type]


def _optional(kind: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for key, field in kind.model_fields.items():
        annotation = field.rebuild_annotation()
        fields[key] = (annotation | None, Field(default=None, description=field.description))
    return create_model(kind.__name__, __doc__=kind.__doc__, __config__=ConfigDict(extra="forbid"), **fields)


# Where things lie is the flow's own affair.
CHANGEABLE = {name: _optional(kind) for name, kind in sections().items() if name != "paths"}
Changes = create_model(
    "Changes",
    __doc__="Keys that differ from the named configuration.",
    __config__=ConfigDict(extra="forbid"),
    **{
        name: (kind | None, Field(default=None, description=(kind.__doc__ or "").partition("\n")[0]))
        for name, kind in CHANGEABLE.items()
    },
)


def as_overrides(changes: Any) -> list[str]:
    """key=value for each change; a null is none."""
    found = changes.model_dump(mode="json", exclude_none=True) if isinstance(changes, BaseModel) else changes or {}
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in found.items()
        for key, value in (values or {}).items()
        if value is not None
    ]
