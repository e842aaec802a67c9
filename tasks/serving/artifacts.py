"""Artifacts of a served model and its evaluation, found through the inputs of its export.

The server uses the evaluation's precision and quantization, and runs code of the model's folder only if the download
was allowed to fetch it. An export without a merged model is served as base and adapter.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.rules import serving
from contract import json_object
from contract.faults import Fault
from contract.served_model import ServedModel
from tasks.run import artifact
from tasks.run.artifact import Artifact, Missing
from tasks.serving.named import Named
from tasks.store import Store

MERGED = "merged/config.json"
ADAPTER = "adapter/adapter_config.json"


@dataclass(frozen=True)
class Sources:
    """An export with its inputs and its evaluation."""

    named: Named
    base: Artifact
    data: Artifact
    evaluation: Artifact | None
    unmerged: bool  # served as base and adapter

    @property
    def form(self) -> str:
        return "base and adapter" if self.unmerged else "merged"

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
    sources = Sources(named, base, data, _evaluation(named, store, unmerged), unmerged)
    if sources.unmerged:
        _require_servable(sources, store, gpus)
    return sources


def served_model(sources: Sources, store: Store, cache: Path, **where: Any) -> ServedModel:
    """Fetch all files to this host, and return the description of the served model."""
    export = artifact.local(sources.named.export, store, cache)
    base = artifact.local(sources.base, store, cache) if sources.unmerged else export / "merged"
    return ServedModel(
        name=sources.named.name,
        model=str(base),
        data=str(artifact.local(sources.data, store, cache)),
        precision=sources.evaluation.stage.config["precision"] if sources.evaluation else _precision(base),
        adapter=str(export / "adapter") if sources.unmerged else None,
        quantization=sources.settings.get("quantization"),
        trust_remote_code=bool(sources.base.stage.config.get("trust_remote_code", False)),
        **where,
    )


def _input(made: Artifact, name: str, stage: str, store: Store, whole: bool = True) -> Artifact:
    key = f"{stage}/{made.stage.inputs[name]}"
    source = artifact.read(store, key)
    if source is None:
        raise Fault(f"{made.key} was made from {key}, which is no longer in {store.uri}")
    if whole and isinstance(missing := artifact.find(source.stage, store), Missing):
        raise Fault(f"{made.key} was made from {key}, which is incomplete in {store.uri}: {missing.reason}")
    return source


def _evaluation(named: Named, store: Store, unmerged: bool) -> Artifact | None:
    """The latest evaluation of this export, preferably in the served form."""
    model = named.export.stage.fingerprint
    records = [record for record in artifact.every(store, "evaluate") if record.stage.inputs["model"] == model]
    whole = [record for record in records if not isinstance(artifact.find(record.stage, store), Missing)]

    def fitness(record: Artifact) -> tuple[bool, float]:
        return (record.stage.config.get("adapter", "merged") != "merged") == unmerged, record.made["at"]

    return max(whole, key=fitness, default=None)


def _require_servable(sources: Sources, store: Store, gpus: bool) -> None:
    """Refuse an adapter that vLLM cannot add, or would silently ignore in part."""
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
    """The precision of a model without an evaluation: that of its weights."""
    config = json.loads((model / "config.json").read_text())
    return "fp32" if (config.get("dtype") or config.get("torch_dtype")) == "float32" else "bf16"
