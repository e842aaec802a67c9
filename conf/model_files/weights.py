"""Tensors of a released model and the file of each, from the model's index and from the headers of the files.

Both must agree on every tensor. Otherwise a program that loads by the index gets other tensors than one that loads all
files. Links are followed, as the Hub's cache consists of links.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from conf.model_files import safetensors_header
from conf.model_files.safetensors_header import Entry as Entry
from contract import json_object, regular_files
from contract.faults import Fault

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# File endings of weights, including formats that are not read here.
ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".index.json", ".distcp")
DESCRIPTION = ".metadata"  # of a distributed checkpoint of torch, Megatron or FSDP, in the folder of its *.distcp
STEP = re.compile(r"(?:iter_|step[=_-]?|checkpoint-)(\d+)")
# Layouts of other stacks that are not read, by the names of their files.
UNREAD = {
    re.compile(r"(^|/)global_step\d+/.*\.pt$"): "DeepSpeed's own layout; run its zero_to_fp32.py first",
    re.compile(r"(^|/)mp_rank_\d+(_\d+)*/|/\.zarray$"): "Megatron's older layout; save with --ckpt-format torch_dist",
}
# Models with vision have their layers in model.language_model; GPT-2's releases use two names.
LAYERS = r"(?:language_model\.)?model\.(?:language_model\.)?layers|(?:transformer\.)?h|backbone\.layers"
LAYER = re.compile(rf"({LAYERS})\.(\d{{1,6}})\.")


def tensors(folder: Path) -> dict[str, Entry]:
    """Return every tensor by name. Raise a Fault if index and files disagree."""
    listed = index(folder / INDEX) if regular_files.is_there(folder / INDEX) else {}
    files = sorted(set(listed.values())) or [SINGLE]
    missing = [file for file in files if not regular_files.is_there(folder / file)]
    if missing and not listed:
        raise Fault(f"{folder}: neither {SINGLE} nor {INDEX}; only safetensors are supported")
    if missing:
        raise Fault(f"{folder}: {len(missing)} of the {len(files)} shards in {INDEX} are missing: {missing[0]}")
    found: dict[str, Entry] = {}
    for file in files:
        header = safetensors_header.read(folder / file)
        for name in header if listed else ():
            if listed.get(name) != file:
                raise Fault(f"{folder / file}: holds {json_object.show(name)}, which {INDEX} does not list there")
        found |= header
    if missing_names := sorted(listed.keys() - found.keys()):
        more = f" and {len(missing_names) - 1} more" if len(missing_names) > 1 else ""
        raise Fault(f"{folder / INDEX}: lists {json_object.show(missing_names[0])}{more}, which the files lack")
    if not found:
        raise Fault(f"{folder}: its files contain no tensors; download them again")
    return found


def require_headers(folder: Path) -> None:
    """Raise a Fault for safetensors without a complete header. Missing files are allowed: a plan does not need them."""
    for file in sorted(folder.glob("*.safetensors")):
        safetensors_header.read(file)


def are_of(path: Path) -> bool:
    """Whether a file contains weights or is an index of weights, by its name."""
    return path.name.endswith(ENDINGS)


def names(folder: Path) -> set[str]:
    """Return the names of the tensors; none if the folder has no weights."""
    if regular_files.is_there(folder / INDEX):
        return {*index(folder / INDEX)}
    return {*tensors(folder)} if regular_files.is_there(folder / SINGLE) else set()


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to, by its name."""
    match = LAYER.match(name)
    return int(match[2]) if match else None


def newest_checkpoint(files: Iterable[str], source: str) -> str | None:
    """Return the folder of the newest distributed checkpoint among files of a source; None if it has none."""
    places = {name.rpartition("/")[0] for name in files if name.rpartition("/")[2] == DESCRIPTION}
    places = {place for place in places if not place.rpartition("/")[2].startswith("optimizer")}
    steps = {place: int((STEP.findall(place) or [-1])[-1]) for place in places}
    last = sorted(place for place in places if steps[place] == max(steps.values()))
    if len(last) > 1:
        raise Fault(f"{source}: several checkpoints: {', '.join(last)}; keep one of them")
    return last[0] if last else None


def unread(name: str) -> str | None:
    """Return the layout of a file of weights that is not read, and what to do."""
    return next((text for pattern, text in UNREAD.items() if pattern.search(name)), None)


def index(path: Path, shown: str = "") -> dict[str, str]:
    """Return the file of each tensor from a model's index. A Fault names the index as `shown`, by default its path."""
    shown = shown or str(path)
    listed = json_object.parse(regular_files.read(path), shown).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise Fault(f"{shown}: weight_map is missing, or not an object with a file for each tensor")
    for name, file in listed.items():
        if not is_plain(file):
            text = f"{json_object.show(name)} lies in {json_object.show(file)}"
            raise Fault(f"{shown}: weight_map: {text}, which is not a name of a file in this folder")
    return listed


def is_plain(name: object) -> bool:
    """Whether this is the name of a file directly in a folder, not a path to another place."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode()) <= 255
        and name not in (".", "..")
        and name.isprintable()
        and not {"/", "\\"} & set(name)
    )
