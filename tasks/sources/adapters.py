"""Adapters that a training starts from (model.adapter): where one lies, and which content it has.

    identity(source)                what a training that starts from it depends on
    as_found(run, found, folder)    the run that starts from it as it was when the run began, in this folder

models:/NAME/VERSION is a version in MLflow's registry, whose tag finetune.adapter says where its adapter lies.
"""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from conf.schema.run import Run
from contract.faults import Fault
from tasks.sources import hub
from tasks.tracking import address

FILES = ("adapter_config.json", "adapter_model.safetensors")
REGISTERED = re.compile(r"models:/(?P<name>[^/]+)/(?P<version>\d+)$")


def identity(source: str, runs: Path) -> dict[str, str]:
    """Digests of the adapter's files."""
    return _described(_resolved(source, runs))


def as_found(run: Run, config: dict[str, Any], folder: Path, runs: Path) -> Run:
    """The run with its adapter in the folder, if it has one. `config` is the stage's, with what identity() found."""
    source = run.model.adapter
    if source is None:
        return run
    fetch(source, config["model"]["adapter"], folder, runs)
    return run.model_copy(update={"model": run.model.model_copy(update={"adapter": str(folder)})})


def fetch(source: str, found: dict[str, str], folder: Path, runs: Path) -> None:
    """Bring the files that identity() found into the folder."""
    resolved = _resolved(source, runs)
    if _described(resolved) != found:
        raise Fault(f"model.adapter: {source}: its files have changed since the run began; start it again")
    hub.fetch_named(resolved, [*FILES], folder)


def _resolved(source: str, runs: Path) -> hub.Resolved:
    place = _registered(source, runs) if source.startswith("models:") else source
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    try:
        resolved = hub.resolve(place, only=FILES)
    except Fault as fault:
        raise Fault(f"model.adapter: {str(fault).removeprefix('model.source: ')}") from None
    if lacking := next((name for name in FILES if name not in resolved.files), None):
        raise Fault(f"model.adapter: {source}: no {lacking}; an adapter in PEFT's form has {' and '.join(FILES)}")
    return resolved


def _registered(source: str, runs: Path) -> str:
    """Where the adapter of a registered version lies."""
    match = REGISTERED.match(source)
    if match is None:
        raise Fault(
            f"model.adapter: {source}: a version in the registry is models:/NAME/VERSION, such as models:/mine/3"
        )
    from mlflow.exceptions import MlflowException

    try:
        tags = address.registry(address.resolve(None, runs)).get_model_version(match["name"], match["version"]).tags
    except MlflowException as error:
        raise Fault(f"model.adapter: {source}: {address.clean(str(error)).splitlines()[0][:200]}") from None
    if "finetune.adapter" not in tags:
        raise Fault(f"model.adapter: {source}: has no tag finetune.adapter: it was not exported with its adapter")
    return tags["finetune.adapter"]


def _described(resolved: hub.Resolved) -> dict[str, str]:
    return {name: resolved.digests[name] for name in sorted(resolved.files)}
