"""Models whose weights are drawn: where their config.json and their tokenizer come from.

    config(source, revision)              its keys, wherever they lie
    identity(model, seed)                 what the drawn model depends on: equal ones have equal bytes
    tokenizer_of(model)                   where the tokenizer lies
    fetch_tokenizer(model, found, folder) brings it, as it was when the run began

trainer/weights/drawn draws the weights.
"""

from pathlib import Path
from typing import Any

from conf.model_files import tokenizer_files
from conf.schema.model import CONFIG, Drawn, Model
from contract import regular_files
from contract.faults import Fault
from tasks.sources import hub
from tasks.sources.hub import config_json


def config(source: Drawn, revision: str) -> dict[str, Any]:
    """The keys of the config.json that weights are drawn for."""
    if isinstance(source.config, dict):
        return source.config
    place = _above(source.config)
    if hub.kind(place) == "tiny":
        raise Fault(f"model.source: {source.config}: has random weights already; model.source={source.config}")
    return config_json.read(place, revision)


def identity(model: Model, seed: int) -> dict[str, Any]:
    """Identity of the drawn model: its keys, the content of its tokenizer, and the seed."""
    assert isinstance(model.source, Drawn)
    return {"config": config(model.source, model.revision), "tokenizer": _tokenizer(model), "seed": seed}


def tokenizer_of(model: Model) -> str:
    assert isinstance(model.source, Drawn)
    if model.tokenizer is not None:
        return model.tokenizer
    assert isinstance(model.source.config, str), "conf/rules/pretraining.py asks for one"
    return _above(model.source.config)


def fetch_tokenizer(model: Model, found: Any, folder: Path) -> None:
    """Bring the tokenizer's files, which are those that identity() found."""
    resolved = _resolved(model)
    if _described(resolved) != found:
        raise Fault(
            f"model.tokenizer: {tokenizer_of(model)}: its files have changed since the run began; start it again"
        )
    hub.fetch_described(resolved, folder, trust_remote_code=False)


def _tokenizer(model: Model) -> Any:
    source = tokenizer_of(model)
    return {"source": source} if hub.kind(source) == "tiny" else _described(_resolved(model))


def _resolved(model: Model) -> hub.Resolved:
    """The source, with the tokenizer's files alone."""
    source = tokenizer_of(model)
    revision = model.revision if model.tokenizer is None else "main"
    resolved = hub.resolve(source, revision, only=tokenizer_files.NAMES)
    if not tokenizer_files.are_among(resolved.files):
        key = "model.source" if model.tokenizer is None else "model.tokenizer"
        named = "; model.tokenizer names another source" if model.tokenizer is None else ""
        raise Fault(f"{key}: {source}: {tokenizer_files.LACKS}{named}")
    return resolved


def _described(resolved: hub.Resolved) -> dict[str, str]:
    return {name: resolved.digests[name] for name in sorted(resolved.files)}


def _above(named: str) -> str:
    """The folder, repository or prefix that a config.json lies in, of which the file itself may be named."""
    place = named.removesuffix(CONFIG)
    if place != named and "://" not in named and not regular_files.is_there(Path(named).expanduser()):
        raise Fault(f"model.source: {named}: no such file{regular_files.or_meant(Path(named))}")
    return place.rstrip("/") or ("." if place != named else named)
