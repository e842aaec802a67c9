"""Exports by name: a version in MLflow's registry, an export in the store, or a run of the flow.

    tiny-tickets                 the champion
    tiny-tickets@7               version 7
    tiny-tickets@challenger      the version with that alias
    export/720f27b0              an export; the part of its fingerprint that tells it apart is enough
    tiny-1122-030000             what that run of the flow has exported

A version names its export by fingerprint and by the digest of its content. Another content is not served by its name.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contract.faults import Fault
from tasks.run import artifact
from tasks.run.artifact import Artifact, Missing
from tasks.stages import promote
from tasks.store import Store
from tasks.tracking.address import clean, public

CHAMPION = "champion"


@dataclass(frozen=True)
class Named:
    """An export that was asked for by a name."""

    name: str  # that callers ask for
    title: str  # for people: "tiny-tickets version 7"
    export: Artifact


def find(asked: str, store: Store, registry: str) -> Named:
    """The export that a name stands for, whole in the store. `registry` is the address of MLflow."""
    if "/" in asked:
        made = _by_fingerprint(asked, store)
        return Named(made.key.replace("/", "-"), made.key, made)
    name, at, which = asked.partition("@")
    if at and not which:
        raise Fault(f"{asked}: behind the @ stands a version or an alias, such as {name}@7")
    if versions := _versions(name, registry):
        return _registered(name, which or CHAMPION, versions, store)
    if not at and (made := _of_run(name, store)):
        return Named(name, f"the export of {name}", made)
    known = ", ".join(_models(registry)) or "no model"
    raise Fault(
        f"{name}: neither a model in the registry at {public(registry)}, which has {known}, nor a run of the flow "
        f"that exported, in {store.uri}"
    )


def _registered(name: str, which: str, versions: dict[str, "Version"], store: Store) -> Named:
    found = versions.get(which) or next((one for one in versions.values() if which in one.aliases), None)
    if found is None:
        there = ", ".join(f"{number}{_in_brackets(one.aliases)}" for number, one in versions.items())
        newest = next(iter(versions))
        raise Fault(f"{name}: no version or alias is {which}; there are {there}: {name}@{newest} is the newest")
    title = f"{name} version {found.number}"
    key = f"export/{found.tags.get('finetune.fingerprint', '')}"
    if not re.fullmatch(r"export/[0-9a-f]{16}", key):
        raise Fault(f"{title}: it has no tag finetune.fingerprint: the flow has not registered it")
    made = _whole(key, store, title)
    if made.digest != found.tags.get("finetune.digest"):
        raise Fault(
            f"{title}: {key} in {store.uri} has another content than the version that was registered: {made.digest}, "
            f"not {found.tags.get('finetune.digest')}"
        )
    return Named(name, title, made)


@dataclass(frozen=True)
class Version:
    """A version in the registry."""

    number: str
    aliases: tuple[str, ...]
    tags: dict[str, str]


def _versions(name: str, registry: str) -> dict[str, Version]:
    """Versions of a model by number, the newest first."""
    if not _is_there(registry) or re.search(r"[/:'\"]", name):
        return {}
    client = promote.registry(registry)
    with _asked(registry):
        if not client.search_registered_models(f"name = '{name}'"):
            return {}
        aliases = client.get_registered_model(name).aliases
        found = sorted(client.search_model_versions(f"name = '{name}'"), key=lambda one: -int(one.version))
    return {
        str(one.version): Version(
            str(one.version),
            tuple(sorted(alias for alias, of in aliases.items() if str(of) == str(one.version))),
            dict(one.tags),
        )
        for one in found
    }


def _models(registry: str) -> list[str]:
    if not _is_there(registry):
        return []
    with _asked(registry):
        return sorted(model.name for model in promote.registry(registry).search_registered_models())


def _is_there(registry: str) -> bool:
    """Whether there may be a registry. MLflow's client would make a database that is not there."""
    return not registry.startswith("sqlite:///") or Path(registry.removeprefix("sqlite:///")).is_file()


@contextlib.contextmanager
def _asked(registry: str) -> Iterator[None]:
    """Turn the error of a registry that does not answer into a Fault."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        line = next(iter(clean(str(error)).splitlines()), "")[:200]
        raise Fault(f"MLflow's registry at {public(registry)} does not answer as one: {line}") from None


def _by_fingerprint(part: str, store: Store) -> Artifact:
    if not part.startswith("export/"):
        raise Fault(f"{part}: no export; python -m flows.artifacts list export shows what there is")
    found = [made.key for made in artifact.every(store, "export") if made.key.startswith(part)]
    if len(found) != 1:
        there = ", ".join(found) or "none; python -m flows.artifacts list export shows what there is"
        raise Fault(f"{part}: names {len(found)} exports in {store.uri}: {there}")
    return _whole(found[0], store, part)


def _of_run(name: str, store: Store) -> Artifact | None:
    """The export of a run of the flow, the latest one of that name."""
    notes = sorted(_notes(name, store), key=lambda note: note.get("started", 0))
    keys = [key for note in notes for key in note.get("artifacts", ()) if key.startswith("export/")]
    return _whole(keys[-1], store, name) if keys else None


def _notes(name: str, store: Store) -> Iterator[dict]:
    for key in store.keys("runs"):
        found = store.read(f"runs/{key}")
        try:
            note = json.loads(found[0]) if found else {}
        except ValueError:
            continue
        if isinstance(note, dict) and note.get("name") == name:
            yield note


def _whole(key: str, store: Store, asked: str) -> Artifact:
    made = artifact.read(store, key)
    if made is None:
        raise Fault(f"{asked}: {key} is not in {store.uri}; FINETUNE_STORE names another store")
    found = artifact.find(made.stage, store)
    if isinstance(found, Missing):
        raise Fault(f"{asked}: {key} is not whole in {store.uri}: {found.reason}; flows.finetune makes it anew")
    return found


def _in_brackets(aliases: tuple[str, ...]) -> str:
    return f" ({', '.join(aliases)})" if aliases else ""
