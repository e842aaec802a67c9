"""Read a run's YAML strictly, and report all its problems at once, one line each.

    python -m conf.load CONF [KEY=VALUE ...]      print the resolved configuration; exit 2 with the problems on stderr

CONF is a file, or the bare name of one in conf/ or conf/documented/. KEY=VALUE overrides one dotted key,
as in train.steps=20; the value is YAML and may be a list, and no key may be given twice.

With `extends: NAME`, a file takes the keys of another one and holds only its name and the keys that differ. NAME is
looked up like CONF; a path is relative to the file. Everything else works as if all keys were in one file.

Each key and value is checked first, then the rules between keys, then the arithmetic of the layout
(conf/rules/layout.py). The rules that need the sizes of the model are checked later, with its config.json.

YAML is read as version 1.2: 1e-4 is a number, yes and on are strings, 010 is not an octal number. Duplicate keys are
refused.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from conf import strict_yaml
from conf.error_lines import key_of, line, reported, show
from conf.host import nvidia_smi
from conf.model_files import weights
from conf.planner import hardware
from conf.rules import layout
from conf.rules.contradictions import contradictions
from conf.schema.data import Part
from conf.schema.model import CONFIG, Drawn
from conf.schema.named import HERE
from conf.schema.run import Run, dotted_keys, sections, spelled_out
from conf.schema.sections import MOST
from conf.strict_yaml import parse, read_text
from contract import closed_pipe, regular_files
from contract.faults import ConfigError
from contract.files import write_atomically
from contract.installation import home

FOLDER = Path(__file__).parent
OWN = home() / "conf" / "own"  # the user's own configurations, which git ignores
# Names are looked up in these folders, in this order. names() lists the configurations in FOLDER and OWN.
FOLDERS = (OWN, FOLDER, FOLDER / "documented")
KEYS = dotted_keys()
SECTIONS = list(sections())
# Only one key of each pair counts: a file or an override that sets one of them removes the other.
INSTEAD = ((("train", "steps"), ("train", "epochs")), (("optimizer", "warmup_steps"), ("optimizer", "warmup")))
EXTENDS = "extends"
DEEPEST = 5  # files in a chain of extends
MAPS = [
    f"{section}.{key}"
    for section, kind in sections().items()
    for key, field in kind.model_fields.items()
    if get_origin(field.annotation) is dict or Drawn in get_args(field.annotation)
]


def load(path: str | os.PathLike[str], overrides: Sequence[str] = (), illegal: bool = False) -> Run:
    """Read and check a configuration with its overrides.

    `illegal` lets a layout that breaks rules pass, as the planner reports the broken rules itself.
    """
    file, shown = _find(os.fspath(path))
    data, inherited, wrong = _read(file, shown)
    values, places, wrong_overrides = read_overrides(overrides)
    places, wrong = inherited | places, wrong + wrong_overrides
    data = _replaced(data, {tuple(key.split(".")): value for key, value in values.items()})
    train = data.get("train")
    if isinstance(train, dict) and train.get("steps") is None and train.get("epochs") is None:
        place = places.get("train.steps", places.get("train.epochs", shown))
        wrong.append(f"{place}: train.steps: required, and missing; or train.epochs, such as train.epochs: 1")
    try:
        run = Run.model_validate(data)
    except ValidationError as error:
        details = reported(error.errors(include_url=False))
        wrong += [f"{_place(places, key_of(detail), shown)}: {line(detail, _meant)}" for detail in details]
        raise ConfigError(*wrong) from None
    run = _drawn_if_without_weights(run)
    if not wrong:
        wrong += [f"{_place(places, key, shown)}: {key}: {text}" for key, text in contradictions(run)]
        if run.world > MOST:
            nodes, each = run.layout.nodes, run.layout.gpus_per_node
            place = next((places[key] for key in ("layout.nodes", "layout.gpus_per_node") if key in places), shown)
            raise ConfigError(*wrong, f"{place}: layout.nodes: {nodes} x {each} is more than {MOST} GPUs")
        broken = [] if illegal or run.layout.auto else layout.problems(run)
        wrong += [f"{places.get(text.partition(':')[0], shown)}: {text}" for text in broken]
    if wrong:
        raise ConfigError(*wrong)
    return _one_host(run) if run.layout.auto and "gpus_per_node" not in run.layout.model_fields_set else run


def _place(places: dict[str, str], key: str, shown: str) -> str:
    """Return the override or the file that sets a key, by default `shown`. A key in a list of sections has an index."""
    return places.get(key, places.get(key.partition("[")[0], shown))


def _read(file: Path, shown: str, chain: tuple[Path, ...] = ()) -> tuple[dict, dict[str, str], list[str]]:
    """Read a file and the files that it extends. `chain` holds the files that extend it.

    Returns the keys by section, the file of each inherited key, and the problems.
    """
    text, chain = read_text(file, shown), (*chain, file)
    data, wrong = parse(text, shown)
    if not isinstance(data, dict):
        kind = "empty" if data is None else show(data)
        raise ConfigError(*wrong or [f"{shown}: {kind}; it takes the sections {', '.join(SECTIONS)}"])
    if "layout" in data:
        data["layout"] = spelled_out(data["layout"])
    if EXTENDS not in data:
        return data, {}, wrong
    name = data.pop(EXTENDS)
    line = next((f":{number}" for number, row in enumerate(text.splitlines(), 1) if row.startswith(EXTENDS)), "")
    place = f"{shown}{line}: {EXTENDS}: {name if isinstance(name, str) else show(name)}"
    if not isinstance(name, str):
        raise ConfigError(*wrong, f"{place} is not a string: it names a configuration, or a file relative to this one")
    if len(chain) == DEEPEST:
        raise ConfigError(*wrong, f"{place}: too deep: at most {DEEPEST} files may extend one another")
    try:
        base, base_shown = _find(name, chain, shown)
    except ConfigError as error:
        raise ConfigError(*wrong, f"{place}: {error}") from None
    if base.resolve() in {user.resolve() for user in chain}:
        raise ConfigError(*wrong, f"{place}: a cycle: {base_shown} leads back to this file")
    inherited, places, wrong_there = _read(base, base_shown, chain)
    inherited.pop("name", None)  # two configurations of one name would share a folder
    own = _by_path(data)
    places = dict.fromkeys(map(_dotted, _by_path(inherited)), base_shown) | places
    for path in own:
        places.pop(_dotted(path), None)
    return _replaced(inherited, own), places, wrong + wrong_there


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def _by_path(data: dict) -> dict[tuple, Any]:
    """Return the values by (section, key), or by (section,) if a section is not a mapping."""
    values: dict[tuple, Any] = {}
    for name, keys in data.items():
        values |= {(name, key): value for key, value in keys.items()} if isinstance(keys, dict) else {(name,): keys}
    return values


def _replaced(data: dict, values: dict[tuple, Any]) -> dict:
    """Return the keys with these values. A value for one key of a pair in INSTEAD removes the other key."""
    data = {name: {**keys} if isinstance(keys, dict) else keys for name, keys in data.items()}
    for pair in INSTEAD:
        for key, (section, other) in (pair, pair[::-1]):
            if values.get(key) is not None and (section, other) not in values and isinstance(data.get(section), dict):
                data[section].pop(other, None)
    for (section, *key), value in values.items():
        if not key:
            data[section] = value
        elif isinstance(data.setdefault(section, {}), dict):  # else the section itself is reported
            data[section][key[0]] = value
    return data


def _drawn_if_without_weights(run: Run) -> Run:
    """Draw random weights if model.source is a folder with a config.json but no weights, and all weights are trained.

    With an adapter the source stays a release: its plan needs only the config.json, and the download reports the
    missing weights.
    """
    source = run.model.source
    if run.adapter.kind != "none" or isinstance(source, Drawn):
        return run
    folder = Path(source).expanduser()
    if not regular_files.is_there(folder / CONFIG) or any(map(weights.are_of, folder.rglob("*"))):
        return run
    return run.changed(model={"source": Drawn(config=source)})


def _one_host(run: Run) -> Run:
    """Set layout.gpus_per_node to all GPUs of a host: of this host if the run stays on it, else of hardware.gpu."""
    gpu = hardware.of(run)
    here = len(nvidia_smi.visible()) if gpu.cuda and run.gang.engine == HERE and run.layout.nodes == 1 else 0
    each = min(here, gpu.per_host) or gpu.per_host
    return run.changed(layout={"gpus_per_node": each})


def dump(run: Run, path: str | os.PathLike[str]) -> None:
    """Write all keys of the run atomically. load() of the file returns an equal Run."""
    write_atomically(path, as_yaml(run), durable=False)


def as_yaml(run: Run) -> str:
    return strict_yaml.dump(run.model_dump(mode="json"))


def replaced(given: Iterable[str], overrides: Sequence[str]) -> list[str]:
    """Return the given overrides without those whose keys the others set, then the others."""
    keys = {override.partition("=")[0] for override in overrides}
    return [*(override for override in given if override.partition("=")[0] not in keys), *overrides]


def names() -> list[str]:
    """Return the names of the configurations that a run may start from."""
    return sorted({file.stem for folder in (FOLDER, OWN) for file in folder.glob("*.yaml")})


def _find(path: str, chain: tuple[Path, ...] = (), user: str = "") -> tuple[Path, str]:
    """Return the file of a configuration, and its path for messages. `user` is the file that extends it."""
    if not re.fullmatch(r"[\w-]+", path):
        shown = os.path.normpath(os.path.join(os.path.dirname(user), path)) if user else path
        file = chain[-1].parent / path if chain else Path(path)
    else:
        files = [folder / f"{path}.yaml" for folder in FOLDERS]
        # A file in conf/own/ may extend the file in conf/ of the same name.
        file = next((file for file in files if file.exists() and file not in chain), FOLDER / f"{path}.yaml")
        shown = os.path.relpath(file, home() if file.parent == OWN else FOLDER.parent)
    if not regular_files.is_there(file):
        known = sorted(file.stem for folder in FOLDERS for file in folder.glob("*.yaml"))
        stem, likely = file.stem, get_close_matches(file.stem, known, n=1)
        by_name = f"; did you mean {likely[0]}?" if likely else ""
        nearby = "" if path == stem or stem in known else regular_files.or_meant(file)
        meant = nearby or by_name or f"; it is a file, or one of {', '.join(known)}"
        raise ConfigError(f"no such configuration: {path}{meant}")
    return file, shown


def read_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the values by key, the text of each override by key, and the problems of unreadable overrides."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    wrong: list[str] = []
    for override in overrides:
        place = f"override {override}"
        key, equals, text = override.partition("=")
        value, not_yaml = parse(text, place)
        if not equals:
            wrong.append(f"{place}: not of the form key=value")
        elif key in SECTIONS:
            wrong.append(f"{place}: {key} is a section; set one of its keys")
        elif key not in KEYS:
            wrong.append(f"{place}: {key}: unknown key{_meant(key)}")
        elif not_yaml or (isinstance(value, dict) and key not in MAPS):
            quoted = "quote a text that begins with * or holds braces or a colon"
            wrong.append(f"{place}: {key}: takes one value, or a list; {quoted}")
        elif key in values:
            wrong.append(f"{place}: {key}: set twice")
        else:
            values[key], places[key] = value, place
    return values, places, wrong


def _meant(key: str) -> str:
    """Return a hint at the key that was probably meant.

    A key of the same name in another section comes first, then a similar key in the same section, then any similar key.
    """
    section, _, name = key.rpartition(".")
    known = (
        [f"{section}.{part}" for part in Part.model_fields] if section.startswith("data.mixture[") else KEYS + SECTIONS
    )
    same = [other for other in known if other.rpartition(".")[2] == name]
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    near = [siblings[other] for other in get_close_matches(name, siblings, n=1)]
    if likely := same or near or get_close_matches(key, KEYS, n=1, cutoff=0.8):
        return f"; did you mean {' or '.join(likely)}?"
    return f"; the keys here are {', '.join(siblings)}" if siblings else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conf.load", description="Print a run's resolved configuration.")
    parser.add_argument("conf", metavar="CONF", help="a YAML file, or the bare name of one in conf/")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="replaces one dotted key")
    args = parser.parse_args(argv)
    try:
        print(as_yaml(load(args.conf, args.overrides)), end="")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    closed_pipe.run(main)
