"""The model of a new configuration: its config.json, sizes and tokenizer, and whether it can be trained.

    read(run.model, folder) -> Model      a Fault names the error and the fix

From the Hub or S3, only config.json and the tokenizer are fetched, some MB. From a folder, nothing is copied.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.model_facts import ModelFacts
from conf.model_files import tokenizer_files, weights
from conf.planner import parameters
from conf.planner.verdict import facts_in
from conf.rules import conversion
from conf.schema.model import Model as ModelSection
from contract.faults import Fault
from tasks.run import launch
from tasks.sources import hub
from tasks.sources.hub import file_choice

CONTEXT = "max_position_embeddings"


@dataclass(frozen=True)
class Model:
    """The facts of a released model that a configuration needs."""

    source: str  # value of model.source; a folder has its absolute path
    config: dict[str, Any]
    facts: ModelFacts
    tokenizer: Path | None  # folder; None if the model's folder holds only config.json
    lacks: str = ""  # missing files, without which the configuration can be planned but not run

    @property
    def parameters(self) -> int:
        return parameters.total(self.facts)

    @property
    def context(self) -> int | None:
        """Longest sequence of the model, in tokens."""
        found = self.config.get(CONTEXT)
        return found if type(found) is int and found > 0 else None

    @property
    def shown(self) -> str:
        return self.source.rstrip("/").rpartition("/")[2] or self.source

    @property
    def size(self) -> str:
        """Number of parameters as text."""
        active = parameters.active(self.facts)
        of_token = f", {amount(active)} of them for each token" if active < 0.9 * self.parameters else ""
        return f"{amount(self.parameters)} parameters{of_token}"


def amount(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:,.0f}"


def whole(source: str) -> str:
    """Return the source with the absolute path of a folder, because a worker runs in another folder."""
    is_there = hub.kind(source) == "folder"
    return str(Path(source).expanduser().resolve()) if is_there else source


def read(wanted: ModelSection, folder: Path) -> Model:
    """Inspect a model. Files that must be downloaded for this are written to `folder`."""
    source = wanted.source
    if not isinstance(source, str):
        raise Fault("model.source: random weights have no model to inspect; conf/llama-125m.yaml shows how to pretrain")
    kind, place = hub.kind(source), f"model.source: {source}"
    if kind == "tiny":
        return _tiny(source, folder)
    source = whole(source)
    resolved = None if kind == "folder" else hub.resolve(source, wanted.revision)
    names = [*resolved.files] if resolved else [path.name for path in Path(source).iterdir()]
    config = hub.config_json(source, wanted.revision)
    if found := conversion.obstacles(config, wanted.ignore_config):
        raise Fault(f"{place}: {'; '.join(found)}")
    facts = facts_in(config, f"{place}: ")
    if resolved is None and not any(map(file_choice.is_weights, names)):
        lacks = f"{source} holds no weights: the configuration can be planned, and runs once *.safetensors are there"
        return Model(source, config, facts, Path(source) if tokenizer_files.are_among(names) else None, lacks)
    if resolved is None:
        weights.require_headers(Path(source))
    chosen, _ = file_choice.choose(names, wanted.unsafe_weights, wanted.trust_remote_code)
    file_choice.require_weights(place, chosen, names, wanted.unsafe_weights)
    file_choice.require_tokenizer(source, names)
    if resolved is None:
        tokenizer_files.check(Path(source), config.get("vocab_size"))
        return Model(source, config, facts, Path(source))
    hub.fetch_described(resolved, folder, wanted.trust_remote_code)
    return Model(source, config, facts, folder)


def _tiny(source: str, folder: Path) -> Model:
    """Make one of this project's tiny models, which exist in no folder."""
    arguments = ["trainer.tiny", source.removeprefix("tiny://"), str(folder), "--dtype", "float32"]
    try:
        launch.process(arguments, folder.with_suffix(".log"), lambda _: None, lambda: False)
    except Fault as fault:
        _, unknown, known = str(fault).rpartition("invalid choice: ")  # after the usage lines
        raise Fault(f"model.source: {source}: no such model: {known}") if unknown else fault from None
    config = hub.config_json(str(folder), "main")
    return Model(source, config, facts_in(config, f"model.source: {source}: "), folder)
