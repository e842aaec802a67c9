"""Exports by name: a version in MLflow's registry, an export in the store, or a run of the flow.

    tiny-tickets                 the champion
    tiny-tickets@7               version 7
    tiny-tickets@challenger      the version with that alias
    export/720f27b0              an export; a unique beginning of its fingerprint is enough
    tiny-1122-030000             the export of that run of the flow

A version records the fingerprint of its export and the digest of its content. Other content is refused.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contract.faults import Fault
from tasks.run import artifact
from tasks.run.artifact import Artifact, Missing
from tasks.stages import promote
from tasks.store import Store
from tasks.tracking.address import clean, public

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"


@dataclass(frozen=True)
class Named:
    """An export with the name that selected it."""

    name: str  # of the model, in requests to the server
    title: str  # in messages, such as "tiny-tickets version 7"
    export: Artifact


def find(reference: str, store: Store, registry: str) -> Named:
    """The export of a reference, complete in the store. `registry` is the address of MLflow."""
    if "/" in reference:
        export = _by_fingerprint(reference, store)
        return Named(export.key.replace("/", "-"), export.key, export)
    name, at, which = reference.partition("@")
    if at and not which:
        raise Fault(f"{reference}: a version or an alias must follow the @, such as {name}@7")
    if versions := _versions(name, registry):
        return _registered(name, which or CHAMPION, versions, store)
    if not at and (export := _of_run(name, store)):
        return Named(name, f"the export of {name}", export)
    known = ", ".join(_models(registry)) or "no model"
    raise Fault(
        f"{name}: neither a model in the registry at {public(registry)}, which has {known}, nor a run of the flow "
        f"with an export in {store.uri}"
    )


def _registered(name: str, which: str, versions: "list[ModelVersion]", store: Store) -> Named:
    by_name = {alias: version for version in versions for alias in version.aliases}
    version = (by_name | {str(version.version): version for version in versions}).get(which)
    if version is None:
        known = ", ".join(f"{other.version}{_in_brackets(other.aliases)}" for other in versions)
        newest = versions[0].version
        raise Fault(f"{name}: has no version or alias {which}; it has {known}: {name}@{newest} is the newest")
    title = f"{name} version {version.version}"
    key = f"export/{version.tags.get('finetune.fingerprint', '')}"
    if not re.fullmatch(r"export/[0-9a-f]{16}", key):
        raise Fault(f"{title}: it has no tag finetune.fingerprint: the flow has not registered it")
    export = _whole(key, store, title)
    if export.digest != version.tags.get("finetune.digest"):
        raise Fault(
            f"{title}: the content of {key} in {store.uri} differs from the registered version: {export.digest}, "
            f"not {version.tags.get('finetune.digest')}"
        )
    return Named(name, title, export)


def _versions(name: str, registry: str) -> "list[ModelVersion]":
    """Versions of a model, the newest first."""
    if not _may_exist(registry) or re.search(r"[/:'\"]", name):
        return []
    with _plainly(registry):
        found = promote.registry(registry).search_model_versions(f"name = '{name}'")
    return sorted(found, key=lambda version: -int(version.version))


def _models(registry: str) -> list[str]:
    if not _may_exist(registry):
        return []
    with _plainly(registry):
        return sorted(model.name for model in promote.registry(registry).search_registered_models())


def _may_exist(registry: str) -> bool:
    """Whether the registry may exist. MLflow's client would create a missing database."""
    return not registry.startswith("sqlite:///") or Path(registry.removeprefix("sqlite:///")).is_file()


@contextlib.contextmanager
def _plainly(registry: str) -> Iterator[None]:
    """Turn errors of the registry into a Fault."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        line = next(iter(clean(str(error)).splitlines()), "")[:200]
        raise Fault(f"MLflow's registry at {public(registry)} fails: {line}") from None


def _by_fingerprint(part: str, store: Store) -> Artifact:
    if not part.startswith("export/"):
        raise Fault(f"{part}: not an export; python -m flows.artifacts list export shows all exports")
    keys = [export.key for export in artifact.every(store, "export") if export.key.startswith(part)]
    if len(keys) != 1:
        shown = ", ".join(keys) or "none; python -m flows.artifacts list export shows all exports"
        raise Fault(f"{part}: matches {len(keys)} exports in {store.uri}: {shown}")
    return _whole(keys[0], store, part)


def _of_run(name: str, store: Store) -> Artifact | None:
    """The export of a run of the flow, the latest one of that name."""
    notes = sorted(_notes(name, store), key=lambda note: note.get("started", 0))
    keys = [key for note in notes for key in note.get("artifacts", ()) if key.startswith("export/")]
    return _whole(keys[-1], store, name) if keys else None


def _notes(name: str, store: Store) -> Iterator[dict]:
    for key in store.keys("runs"):
        entry = store.read(f"runs/{key}")
        try:
            note = json.loads(entry[0]) if entry else {}
        except ValueError:
            continue
        if isinstance(note, dict) and note.get("name") == name:
            yield note


def _whole(key: str, store: Store, title: str) -> Artifact:
    record = artifact.read(store, key)
    if record is None:
        raise Fault(f"{title}: {key} is not in {store.uri}; FINETUNE_STORE names another store")
    export = artifact.find(record.stage, store)
    if isinstance(export, Missing):
        raise Fault(f"{title}: {key} is incomplete in {store.uri}: {export.reason}; flows.finetune makes it again")
    return export


def _in_brackets(aliases: list[str]) -> str:
    return f" ({', '.join(sorted(aliases))})" if aliases else ""
