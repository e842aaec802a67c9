"""Reader of a model's config.json from the Hub, a folder or S3, without fetching the model.

Not covered: tiny://KIND, which is not on a disk yet.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from conf.model_files.config_json import NAME
from contract import json_object
from contract.faults import Fault
from tasks.sources import hub


def read(source: str, revision: str) -> dict[str, Any]:
    """The source's current config.json. Raises a Fault if it has none."""
    resolved = hub.resolve(source, revision, only=(NAME,))
    if NAME not in resolved.files:
        raise Fault(f"{source}: has no {NAME}; a model has one next to its weights")
    with TemporaryDirectory(prefix="config-") as folder:
        hub.fetch_named(resolved, [NAME], Path(folder))
        return json_object.parse((Path(folder) / NAME).read_bytes(), f"{source}: its {NAME}")
