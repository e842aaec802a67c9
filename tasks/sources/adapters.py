"""Adapters that a training starts from (model.adapter): their location and the digests of their content.

    identity(source)                   digests of its files
    as_found(run, config, folder)      the run with its adapter fetched to this folder, at the state of the run's start

models:/NAME/VERSION is a version in MLflow's registry; its tag finetune.adapter has the location of its adapter.
"""

import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

from conf import peft_adapter
from conf.rules import starting_adapter
from conf.schema.run import Run
from contract.faults import Fault
from contract.installation import runs_folder
from tasks.sources import hub
from tasks.tracking import address

FILES = (peft_adapter.CONFIG, peft_adapter.WEIGHTS)
REGISTERED = re.compile(r"models:/(?P<name>[^/]+)/(?P<version>\d+)$")


def identity(source: str, key: str = "model.adapter") -> dict[str, str]:
    """Digests of the adapter's files."""
    return _resolved(source, key).content


def check(run: Run, model: dict[str, Any]) -> None:
    """Raise a Fault for an adapter that this run cannot use. Only the adapter's files are fetched, a few MB."""
    for key in ("adapter", "merge_adapter"):
        if source := getattr(run.model, key):
            with TemporaryDirectory(prefix="adapter-") as name:
                folder = Path(name) / "files"
                fetch(source, identity(source, f"model.{key}"), folder, f"model.{key}")
                try:
                    adapter = peft_adapter.read(folder, model, key=f"model.{key}")
                    if key == "adapter":
                        starting_adapter.check(run, adapter)
                except Fault as fault:
                    raise Fault(str(fault).replace(str(folder), source)) from None


def as_found(run: Run, config: dict[str, Any], folder: Path) -> Run:
    """The run with its adapter in the folder, if it has one. `config` is the stage's, with the result of identity()."""
    source = run.model.adapter
    if source is None:
        return run
    fetch(source, config["model"]["adapter"], folder)
    return run.changed(model={"adapter": str(folder)})


def fetch(source: str, digests: dict[str, str], folder: Path, key: str = "model.adapter") -> None:
    """Fetch the files with the digests of identity() into the folder."""
    resolved = _resolved(source, key)
    if resolved.content != digests:
        raise Fault(f"{key}: {source}: its files have changed since the run began; start it again")
    hub.fetch_named(resolved, [*FILES], folder)


def _resolved(source: str, key: str) -> hub.Resolved:
    place = _registered(source, key) if source.startswith("models:") else source
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    try:
        resolved = hub.resolve(place, only=(*FILES, peft_adapter.PICKLED))
    except Fault as fault:
        raise Fault(f"{key}: {str(fault).removeprefix('model.source: ')}") from None
    if lacking := next((name for name in FILES if name not in resolved.files), None):
        if peft_adapter.PICKLED in resolved.files:
            raise Fault(f"{key}: {source}: {peft_adapter.UNSAFE}")
        raise Fault(f"{key}: {source}: no {lacking}; an adapter in PEFT's form has {' and '.join(FILES)}")
    kept = {name: resolved.files[name] for name in FILES}
    return replace(resolved, files=kept, digests={name: resolved.digests[name] for name in FILES})


def _registered(source: str, key: str) -> str:
    """Location of the adapter of a registered version."""
    match = REGISTERED.match(source)
    if match is None:
        raise Fault(f"{key}: {source}: a version in the registry is models:/NAME/VERSION, such as models:/mine/3")
    from mlflow.exceptions import MlflowException

    registry = address.registry(address.resolve(None, runs_folder()))
    try:
        tags = registry.get_model_version(match["name"], match["version"]).tags
    except MlflowException as error:
        raise Fault(f"{key}: {source}: {address.clean(str(error)).splitlines()[0][:200]}") from None
    if "finetune.adapter" not in tags:
        raise Fault(f"{key}: {source}: has no tag finetune.adapter: it was not exported with its adapter")
    return tags["finetune.adapter"]
