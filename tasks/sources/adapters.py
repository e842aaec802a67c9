"""Adapters that a training starts from (model.adapter): their location and the digests of their content.

    identity(source)                   digests of its files
    as_found(run, config, folder)      the run with its adapter fetched to this folder, at the state of the run's start

models:/NAME/VERSION is a version in MLflow's registry; its tag finetune.adapter has the location of its adapter.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from conf.schema.run import Run
from contract.faults import Fault
from contract.installation import runs_folder
from tasks.sources import hub
from tasks.tracking import address

FILES = ("adapter_config.json", "adapter_model.safetensors")
REGISTERED = re.compile(r"models:/(?P<name>[^/]+)/(?P<version>\d+)$")


def identity(source: str) -> dict[str, str]:
    """Digests of the adapter's files."""
    return _resolved(source).content


def as_found(run: Run, config: dict[str, Any], folder: Path) -> Run:
    """The run with its adapter in the folder, if it has one. `config` is the stage's, with the result of identity()."""
    source = run.model.adapter
    if source is None:
        return run
    fetch(source, config["model"]["adapter"], folder)
    return run.changed(model={"adapter": str(folder)})


def fetch(source: str, digests: dict[str, str], folder: Path) -> None:
    """Fetch the files with the digests of identity() into the folder."""
    resolved = _resolved(source)
    if resolved.content != digests:
        raise Fault(f"model.adapter: {source}: its files have changed since the run began; start it again")
    hub.fetch_named(resolved, [*FILES], folder)


def _resolved(source: str) -> hub.Resolved:
    place = _registered(source) if source.startswith("models:") else source
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    try:
        resolved = hub.resolve(place, only=FILES)
    except Fault as fault:
        raise Fault(f"model.adapter: {str(fault).removeprefix('model.source: ')}") from None
    if lacking := next((name for name in FILES if name not in resolved.files), None):
        raise Fault(f"model.adapter: {source}: no {lacking}; an adapter in PEFT's form has {' and '.join(FILES)}")
    return resolved


def _registered(source: str) -> str:
    """Location of the adapter of a registered version."""
    match = REGISTERED.match(source)
    if match is None:
        raise Fault(
            f"model.adapter: {source}: a version in the registry is models:/NAME/VERSION, such as models:/mine/3"
        )
    from mlflow.exceptions import MlflowException

    registry = address.registry(address.resolve(None, runs_folder()))
    try:
        tags = registry.get_model_version(match["name"], match["version"]).tags
    except MlflowException as error:
        raise Fault(f"model.adapter: {source}: {address.clean(str(error)).splitlines()[0][:200]}") from None
    if "finetune.adapter" not in tags:
        raise Fault(f"model.adapter: {source}: has no tag finetune.adapter: it was not exported with its adapter")
    return tags["finetune.adapter"]
