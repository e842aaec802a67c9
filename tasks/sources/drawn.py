"""Sources of the config.json and the tokenizer of a model whose weights are drawn at random.

    config(source, revision)                 the keys of its config.json
    identity(model, seed)                    everything that the drawn model depends on: equal ones have equal bytes
    tokenizer_of(model)                      location of the tokenizer
    fetch_tokenizer(model, digests, folder)  fetches it, at the state of the run's start

trainer/weights/drawn draws the weights.
"""

from pathlib import Path
from typing import Any

from conf.model_files import tokenizer_files
from conf.schema.model import CONFIG, Drawn, Model
from contract import regular_files
from contract.faults import Fault
from tasks.sources import hub


def config(source: Drawn, revision: str) -> dict[str, Any]:
    """The keys of the config.json that weights are drawn for."""
    if isinstance(source.config, dict):
        return source.config
    place = _above(source.config)
    if hub.kind(place) == "tiny":
        raise Fault(f"model.source: {source.config}: has random weights already; model.source={source.config}")
    return hub.config_json(place, revision)


def identity(model: Model, seed: int) -> dict[str, Any]:
    """Identity of the drawn model: its keys, the content of its tokenizer, and the seed."""
    assert isinstance(model.source, Drawn)
    return {"config": config(model.source, model.revision), "tokenizer": _tokenizer(model), "seed": seed}


def tokenizer_of(model: Model) -> str:
    assert isinstance(model.source, Drawn)
    if model.tokenizer is not None:
        return model.tokenizer
    assert isinstance(model.source.config, str), "conf/rules/pretraining.py requires one"
    return _above(model.source.config)


def fetch_tokenizer(model: Model, digests: Any, folder: Path) -> None:
    """Fetch the tokenizer's files, with the digests of identity()."""
    resolved = _resolved(model)
    if resolved.content != digests:
        raise Fault(
            f"model.tokenizer: {tokenizer_of(model)}: its files have changed since the run began; start it again"
        )
    hub.fetch_described(resolved, folder, trust_remote_code=False)


def _tokenizer(model: Model) -> Any:
    source = tokenizer_of(model)
    return {"source": source} if hub.kind(source) == "tiny" else _resolved(model).content


def _resolved(model: Model) -> hub.Resolved:
    """The source, reduced to the tokenizer's files."""
    source = tokenizer_of(model)
    revision = model.revision if model.tokenizer is None else "main"
    resolved = hub.resolve(source, revision, only=tokenizer_files.NAMES)
    if not tokenizer_files.are_among(resolved.files):
        key = "model.source" if model.tokenizer is None else "model.tokenizer"
        named = "; model.tokenizer names another source" if model.tokenizer is None else ""
        raise Fault(f"{key}: {source}: {tokenizer_files.LACKS}{named}")
    return resolved


def _above(source: str) -> str:
    """The folder, repository or prefix of a config.json; `source` may also name the file itself."""
    place = source.removesuffix(CONFIG)
    if place != source and "://" not in source and not regular_files.is_there(Path(source).expanduser()):
        raise Fault(f"model.source: {source}: no such file{regular_files.or_meant(Path(source))}")
    return place.rstrip("/") or ("." if place != source else source)
