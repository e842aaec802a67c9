"""A model's config.json alone, from wherever the model lies: some KB that say what some hundred GB hold.

Not covered: tiny://KIND, which is on no disk yet.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from tasks import hub
from tasks.faults import Fault
from tasks.hub import api

NAME = "config.json"


def read(source: str, revision: str) -> dict[str, Any]:
    """As the source has it now; a fault where it has none."""
    where = hub.kind(source)
    assert where != "tiny"
    text = {"hub": _of_hub, "folder": _of_folder, "s3": _of_s3}[where](source, revision)
    if text is None:
        raise Fault(f"{source}: no {NAME} there; a model has one beside its weights")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Fault(f"{source}: its {NAME} is not JSON with a section of keys; the model is damaged")
    return found


def _of_hub(source: str, revision: str) -> bytes | None:
    from huggingface_hub import hf_hub_url

    found = hub.resolve(source, revision)
    if NAME not in found.files:
        return None
    api.keep_addresses_out_of_logs()
    url = hf_hub_url(source, NAME, revision=found.commit, endpoint=api.endpoint())
    with TemporaryDirectory(prefix="config-") as folder:
        part = Path(folder) / NAME
        try:
            api.receive(url, part, found.files[NAME], found.digests[NAME], lambda count, sent=False: None, Event())
        except Exception as error:
            raise api.fault(error, source, found.commit) from None
        return part.read_bytes()


def _of_folder(source: str, revision: str) -> bytes | None:
    path = Path(source).expanduser() / NAME
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Fault(f"{path}: {error.strerror}") from None


def _of_s3(source: str, revision: str) -> bytes | None:
    from tasks.store import open_store

    found = open_store(source).read(NAME)
    return found[0] if found else None
