"""Find an export by name, and the artifacts of the served model through the inputs of the export.

    tiny-tickets                 the champion of a model in MLflow's registry
    tiny-tickets@7               version 7
    tiny-tickets@challenger      the version with that alias
    export/720f27b0              an export in the store; a unique beginning of its fingerprint is enough
    tiny-1122-030000             the export of that run of the flow

A version records the fingerprint of its export and the digest of its content. Other content is refused. The server uses
the evaluation's precision and quantization, and runs code of the model's folder only if the download was allowed to
fetch it. An export without a merged model is served as base and adapter; the base is packed if it was evaluated so.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.rules import serving
from contract import json_object
from contract.faults import Fault
from contract.served_model import ServedAdapter, ServedModel, stamp
from tasks.run import artifact
from tasks.run.artifact import Artifact, Missing
from tasks.serving import adapters
from tasks.stages import promote
from tasks.store import Store
from tasks.tracking.address import clean, public

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
MERGED = "merged/config.json"
ADAPTER = "adapter/adapter_config.json"
BASE = "-base"  # suffix of the name by which callers get the model without an adapter


@dataclass(frozen=True)
class Named:
    """An export with the name that selected it."""

    name: str  # of the model, in requests to the server
    title: str  # in messages, such as "tiny-tickets version 7"
    export: Artifact
    version: str = ""  # of a registered model

    @property
    def names(self) -> list[str]:
        """Return the names of an adapter in requests: that of the version first."""
        return [f"{self.name}@{self.version}", self.name] if self.version else [self.name]


def find(reference: str, store: Store, registry: str) -> Named:
    """Return the export of a reference, complete in the store. `registry` is the address of MLflow."""
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
    return Named(name, title, export, str(version.version))


def _versions(name: str, registry: str) -> "list[ModelVersion]":
    """Return the versions of a model, the newest first."""
    if not _may_exist(registry) or re.search(r"[/:'\"]", name):
        return []
    client = promote.registry(registry)
    with _plainly(registry):
        found = client.search_model_versions(f"name = '{name}'")
        numbers = client.get_registered_model(name).aliases if found else {}
    for version in found:
        version.aliases = [alias for alias, number in numbers.items() if str(number) == str(version.version)]
    return sorted(found, key=lambda version: -int(version.version))


def _models(registry: str) -> list[str]:
    if not _may_exist(registry):
        return []
    with _plainly(registry):
        return sorted(model.name for model in promote.registry(registry).search_registered_models())


def _may_exist(registry: str) -> bool:
    """Return whether the registry may exist: MLflow's client would create a missing database."""
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


@dataclass(frozen=True)
class Sources:
    """An export with its inputs and its evaluation."""

    named: Named
    base: Artifact
    data: Artifact
    evaluation: Artifact | None
    unmerged: bool  # served as base and adapter
    codes: Artifact | None = None  # of a packed base that is served

    @property
    def form(self) -> str:
        return f"{'packed ' * bool(self.codes)}base and adapter" if self.unmerged else "merged"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the evaluation; empty without one."""
        return self.evaluation.stage.config["evaluate"] if self.evaluation else {}


def collect(named: Named, store: Store, adapter: bool, gpus: bool) -> Sources:
    """Find the artifacts. `adapter` requests the form of base and adapter; `gpus` is whether this host has GPUs."""
    export = named.export
    merged = MERGED in export.files
    if not merged and ADAPTER not in export.files:
        raise Fault(f"{named.title}: {export.key} contains neither a merged model nor an adapter")
    if adapter and ADAPTER not in export.files:
        raise Fault(f"{named.title}: {export.key} contains no adapter (export.formats, or all weights were trained)")
    base = _input(export, "model", "download", store)
    trained = _input(export, "trained", "train", store, whole=False)
    data = _input(trained, "data", "prepare", store)
    unmerged = adapter or not merged
    evaluation = _evaluation(named, store, unmerged)
    sources = Sources(named, base, data, evaluation, unmerged, _codes(evaluation, store) if unmerged else None)
    if sources.unmerged:
        _require_servable(sources, store, gpus)
    return sources


def served_model(sources: Sequence[Sources], store: Store, cache: Path, room: int = 1, **where: Any) -> ServedModel:
    """Fetch all files to this host, and return the description of the served model, with room for so many adapters."""
    first = sources[0]
    own = _base(first, store, cache)
    for other in sources[1:]:
        require_base(other, own, store, cache)
    unmerged = [adapter(one, store, cache) for one in sources if one.unmerged]
    placed: list[ServedAdapter] = []
    for one in unmerged:
        placed = adapters.placed(placed, one, moves=False)
    return ServedModel(
        name=f"{first.named.name}{BASE}" if first.unmerged else first.named.name,
        data=str(artifact.local(first.data, store, cache)),
        room=max(room, len(placed)) if first.unmerged else 0,
        adapters=placed,
        sized_by=[one.folder for one in placed],
        **own,
        **where,
    )


def adapter(sources: Sources, store: Store, cache: Path) -> ServedAdapter:
    """Fetch an adapter to this host, and describe it."""
    folder = artifact.local(sources.named.export, store, cache) / "adapter"
    return ServedAdapter(sources.named.names, str(folder), str(artifact.local(sources.data, store, cache)))


def require_base(sources: Sources, served: dict[str, Any], store: Store, cache: Path) -> None:
    """Raise a Fault for an adapter of another base than the served one, or of one that is computed differently."""
    for key, needed in _base(sources, store, cache).items():
        if served[key] != needed and key == "stamp":
            raise Fault(f"{served['model']}: its files have changed since the server loaded them; start it again")
        if served[key] != needed:
            raise Fault(f"{sources.named.title}: needs {key} {needed}, but the server has {served[key]}")


def _base(sources: Sources, store: Store, cache: Path) -> dict[str, Any]:
    """Return what adapters of one server have in common: the base, and how it is computed."""
    export = artifact.local(sources.named.export, store, cache)
    base = artifact.local(sources.base, store, cache) if sources.unmerged else export / "merged"
    base = artifact.local(sources.codes, store, cache) / "merged" if sources.codes else base
    return {
        "model": str(base),
        "stamp": stamp(base),
        "precision": sources.evaluation.stage.config["precision"] if sources.evaluation else _precision(base),
        "quantization": sources.settings.get("quantization"),
        "trust_remote_code": bool(sources.base.stage.config.get("trust_remote_code", False)),
    }


def _input(made: Artifact, name: str, stage: str, store: Store, whole: bool = True) -> Artifact:
    key = f"{stage}/{made.stage.inputs[name]}"
    source = artifact.read(store, key)
    if source is None:
        raise Fault(f"{made.key} was made from {key}, which is no longer in {store.uri}")
    if whole and isinstance(missing := artifact.find(source.stage, store), Missing):
        raise Fault(f"{made.key} was made from {key}, which is incomplete in {store.uri}: {missing.reason}")
    return source


def _evaluation(named: Named, store: Store, unmerged: bool) -> Artifact | None:
    """Return the latest evaluation of this export, preferably in the served form."""
    model = named.export.stage.fingerprint
    records = [record for record in artifact.every(store, "evaluate") if record.stage.inputs["model"] == model]
    whole = [record for record in records if not isinstance(artifact.find(record.stage, store), Missing)]

    def fitness(record: Artifact) -> tuple[bool, float]:
        return (record.stage.config.get("adapter", "merged") != "merged") == unmerged, record.made["at"]

    return max(whole, key=fitness, default=None)


def _codes(evaluation: Artifact | None, store: Store) -> Artifact | None:
    """Return the packed base with which the adapter was evaluated, if it was."""
    if evaluation is None or evaluation.stage.config.get("adapter") != "packed":
        return None
    return _input(_input(evaluation, "before", "evaluate", store, whole=False), "model", "pack", store)


def _require_servable(sources: Sources, store: Store, gpus: bool) -> None:
    """Raise a Fault for an adapter that vLLM cannot add, or would silently ignore in part."""
    key = sources.named.export.key
    entry = store.read(f"{key}/files/{ADAPTER}")
    config = json_object.parse(entry[0] if entry else b"", f"{key}: {ADAPTER}")
    merged = "serve it merged" if MERGED in sources.named.export.files else "export it with export.formats=[merged]"
    targets = [*(config.get("target_modules") or ()), *(config.get("target_parameters") or ())]
    latent = any(serving.LATENT in target for target in targets)
    experts = any(re.search(r"(^|\.)experts\.", target) for target in targets)
    for reason in serving.unadded(dora=bool(config.get("use_dora")), latent=latent, experts=experts, cpu=not gpus):
        raise Fault(f"{sources.named.title}: {reason}; {merged}")


def _precision(model: Path) -> str:
    """Return the precision of a model without an evaluation: the precision of its weights."""
    config = json.loads((model / "config.json").read_text())
    return "fp32" if (config.get("dtype") or config.get("torch_dtype")) == "float32" else "bf16"
