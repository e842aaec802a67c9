"""Reader of a model's config.json from the Hub, a folder or S3, without fetching the model.

Not covered: tiny://KIND, which is not on a disk yet.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from conf.model_files.config_json import NAME
from contract import json_object, regular_files
from contract.faults import Fault
from tasks.sources import hub
from tasks.sources.hub import api


def read(source: str, revision: str) -> dict[str, Any]:
    """The source's current config.json. Raises a Fault if it has none."""
    where = hub.kind(source)
    assert where != "tiny"
    text = {"hub": _of_hub, "folder": _of_folder, "s3": _of_s3}[where](source, revision)
    if text is None:
        raise Fault(f"{source}: has no {NAME}; a model has one next to its weights")
    return json_object.parse(text, f"{source}: its {NAME}")


def _of_hub(source: str, revision: str) -> bytes | None:
    from huggingface_hub import hf_hub_url

    resolved = hub.resolve(source, revision)
    if NAME not in resolved.files:
        return None
    api.keep_addresses_out_of_logs()
    url = hf_hub_url(source, NAME, revision=resolved.commit, endpoint=api.endpoint())
    size, digest = resolved.files[NAME], resolved.digests[NAME]
    with TemporaryDirectory(prefix="config-") as folder:
        part = Path(folder) / NAME
        try:
            api.receive(url, part, size, digest, lambda count, sent=False: None, Event())
        except Exception as error:
            raise api.fault(error, source, resolved.commit) from None
        return part.read_bytes()


def _of_folder(source: str, revision: str) -> bytes | None:
    path = Path(source).expanduser() / NAME
    return regular_files.read(path) if regular_files.is_there(path) else None


def _of_s3(source: str, revision: str) -> bytes | None:
    from tasks.store import open_store

    entry = open_store(source).read(NAME)
    return entry[0] if entry else None
