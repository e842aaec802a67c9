"""Model families: one file each, with everything that the planner, the rules and the trainer know about the family.

The config.json of a family's tiny model is next to that file.

    of(config)            the Family of a config.json; OTHER for an unknown model, whose sizes are read by Llama's names
    as_text(config)       a config.json as transformers reads its keys for the text model
    named(architecture)   the first family of an architecture, or OTHER
    layer(facts, kind)    tensors of a layer: all, or those of one kind
    every()               all families by model_type: the files of this folder, the entry points `finetune.families` of
                          installed packages, and those that add() has loaded
    digest(place)         digest of the file of a family from outside the repository
    add(place)            load a family from outside the repository: a Python file, or the import path of a module

docs/extending/family.md shows how to add one. No module here imports torch; the torch part of a family has the same
file name in trainer/megatron/bridges/ and trainer/patches/families/, if it needs one.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from conf.families.parts.family import Family as Family
from conf.families.parts.family import Serving as Serving
from conf.families.parts.sizes import ModelFacts
from conf.families.parts.tensors import Tensor
from conf.model_files import config_json
from contract import checksums, json_object

GROUP = "finetune.families"
PLACE = "FINETUNE_FAMILY"  # environment variable: place of one more family, for commands that read no run
OTHER = Family(architecture="", model_type="", read=(), serving=None)


def of(config: dict[str, Any]) -> Family:
    architecture = config_json.architecture(config)
    family = every().get(str(config.get("model_type")), OTHER)
    return family if family.architecture == architecture else named(architecture)


def named(architecture: str) -> Family:
    same = [family for family in every().values() if family.architecture == architecture]
    return next((family for family in same if not family.read_as), same[0] if same else OTHER)


def as_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config.json for the text model, with the model_type by which transformers reads them."""
    keys = config_json.with_floats(config_json.of_text(config))
    return {**keys, "model_type": of(config).read_as or config.get("model_type")}


@lru_cache
def layer(facts: ModelFacts, kind: str, of: str = "") -> tuple[Tensor, ...]:
    tensors = named(facts.architecture).layer(facts, kind)
    return tuple(tensor for tensor in tensors if of in ("", tensor.kind))


@cache
def every() -> dict[str, Family]:
    names = [info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    modules += [entry.load() for entry in importlib.metadata.entry_points(group=GROUP)]
    modules += [module(os.environ[PLACE])] if os.environ.get(PLACE) else []
    return {family.model_type: family for family in map(_of, modules)}


def add(place: str) -> Family:
    """Load and register a family. Raise ValueError if the place has no family."""
    try:
        family = _of(module(place))
    except Exception as error:  # any exception, as the module is the user's
        raise ValueError(f"no family can be loaded from it: {type(error).__name__}: {error}") from None
    if not isinstance(family, Family):
        raise ValueError("FAMILY in it is not a conf.families.Family")
    if family.megatron and _file_of(family.megatron) is None:
        raise ValueError(f"megatron in it: {family.megatron}: no such file or module")
    every()[family.model_type] = family
    layer.cache_clear()
    return family


def digest(place: str) -> str:
    """Return the SHA-256 of the file of a family from outside the repository, its torch part and its tiny models."""
    file = Path(module(place).__file__ or "")
    files = [file, _file_of(_of(module(place)).megatron), *_tiny_files(file).values()]
    return checksums.of(b"".join(file.read_bytes() for file in files if file))


def _of(module: ModuleType) -> Family:
    """Return the family of a module. Its tiny models and the file of a torch part are next to the module's file."""
    family, file = module.FAMILY, Path(module.__file__ or "")
    if not isinstance(family, Family):
        return family
    if not family.tiny:
        tiny = {suffix: json_object.read(path) for suffix, path in _tiny_files(file).items()}
        family = replace(family, tiny=tiny)
    if family.megatron.endswith(".py"):
        family = replace(family, megatron=str(file.parent / Path(family.megatron).expanduser()))
    return family


def _tiny_files(family: Path) -> dict[str, Path]:
    """Return the files of the tiny models of NAME.py, by suffix: NAME.json and NAME-SUFFIX.json."""
    names = {path.stem.partition("-"): path for path in family.parent.glob("*.json")}
    return {suffix: path for (name, _, suffix), path in sorted(names.items()) if name == family.stem}


def _file_of(part: str) -> Path | None:
    """Return the file of a torch part, which is a file or an import path; None if there is none."""
    if part.endswith(".py"):
        return Path(part) if Path(part).is_file() else None
    try:
        spec = importlib.util.find_spec(part) if part else None
    except ModuleNotFoundError:  # the package that should contain it
        return None
    return Path(spec.origin) if spec and spec.origin else None


@cache
def module(place: str) -> ModuleType:
    """Return the module at an import path, or in a Python file."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(f"families_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tiny() -> dict[str, dict[str, Any]]:
    """Return the config.json of each tiny model, by its name.

    They have 4 layers for 4 pipeline stages or 2 x 2 virtual ones, 2 key-value heads for 2 tensor ranks, and 8 experts
    for 4 expert ranks. A vocabulary of 512 needs no padding. vLLM's CPU attention needs heads of 32 or more.
    """
    return {
        "-".join((family.model_type.replace("_", "-"), *variant.split())): {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **keys,
        }
        for family in every().values()
        for variant, keys in family.tiny.items()
    }
