"""Tensors of a checkpoint by the names of a release: safetensors, pickles, FSDP's or Megatron's distributed checkpoint.

Pickles and FSDP's checkpoints have the names of the model in memory. transformers 5 keeps all experts of a layer in two
tensors there, and some wrappers add a beginning to each name. Megatron's names are mapped by Megatron-Bridge's tables.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from conf import families
from conf.families.parts.tensors import COPY
from conf.model_facts import facts_from_hf, shapes
from conf.model_files import config_json, weights
from conf.peft_adapter import canonical
from contract.faults import Fault
from trainer.startup import device
from trainer.weights import released, released_tensors, torch_dist
from trainer.weights.adopted.files import TYPES, Made
from trainer.weights.released import COMPUTED

PICKLES = ("pytorch_model*.bin", "model*.bin")
OF_MEGATRON = re.compile(r"^((module|language_model)\.)*(decoder|embedding|output_layer|mtp)\.")
EXPERT = re.compile(r"(?P<stack>.+\.experts)\.(?P<number>\d+)\.(?P<part>gate|up|down)\.weight")

Read = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]  # a box of a tensor, by offsets and sizes


def read(folder: Path) -> tuple[str, dict[str, Made]]:
    """Return the kind of checkpoint, and its tensors by the names of a release."""
    config = config_json.read(folder / config_json.NAME)
    if (folder / weights.SINGLE).exists() or (folder / weights.INDEX).exists():
        return "a release", _of_release(folder)
    if found := [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]:
        return "pickles", _named(folder, config, _of_pickles(found))
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    newest = weights.newest_checkpoint(files, str(folder))
    if newest is None:
        text = f"no weights: neither safetensors nor a distributed checkpoint with {weights.DESCRIPTION}"
        unread = next(filter(None, map(weights.unread, files)), None)
        raise Fault(f"{folder}: {f'its weights have {unread}' if unread else text}")
    place = folder / newest
    stored = torch_dist.open_checkpoint(place)
    if any(OF_MEGATRON.match(name) for name in stored.places):
        return f"Megatron's checkpoint {place}", _of_megatron(folder, config, stored)
    return f"the distributed checkpoint {place}", _named(folder, config, _of_stored(stored))


def _of_release(folder: Path) -> dict[str, Made]:
    model = released.read(folder)
    if model.packed:
        raise Fault(f"model.merge_adapter: {folder}: its weights are quantised; merge into the unquantised release")
    unread = {name: entry.dtype for name, entry in model.tensors.items() if entry.dtype not in TYPES}
    lost = [f"{name} ({dtype})" for name, dtype in unread.items() if not COMPUTED.search(name)]
    released.require_none(folder, {"tensors of a type that is not read": lost})
    return {
        name: Made(TYPES[entry.dtype], entry.shape, partial(released_tensors.read, model, name))
        for name, entry in model.tensors.items()
        if name not in unread
    }


def _of_pickles(files: list[Path]) -> dict[str, tuple[torch.dtype, tuple[int, ...], Read]]:
    found: dict[str, tuple[torch.dtype, tuple[int, ...], Read]] = {}
    for path in files:
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # pickle raises any type
            text = " ".join(str(error).split())[:100]
            raise Fault(f"{path}: not readable as tensors alone ({type(error).__name__}: {text})") from None
        if isinstance(inner := content.get("state_dict", content.get("model")), dict):
            content = inner
        for name, tensor in content.items():
            if not isinstance(tensor, torch.Tensor):
                raise Fault(f"{path}: {name} is {type(tensor).__name__}, not a tensor")
            found[name] = tensor.dtype, tuple(tensor.shape), partial(_box, tensor)
    return found


def _box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]


def _of_stored(stored: torch_dist.Stored) -> dict[str, tuple[torch.dtype, tuple[int, ...], Read]]:
    whole = {}
    for key, entry in stored.metadata.state_dict_metadata.items():
        if isinstance(entry, torch_dist.TensorStorageMetadata) and not torch_dist.NOT_WEIGHTS.search(key):
            whole[key] = torch_dist.Place(key, key, (), tuple(entry.size), entry.properties.dtype, tuple(entry.chunks))
    whole = {key: place for key, place in whole.items() if not key.startswith(("optim.", "optimizer."))}
    stored = replace(stored, places=whole)
    return {key: (place.dtype, place.shape, partial(torch_dist.box, stored, key)) for key, place in whole.items()}


def _named(folder: Path, config: dict, found: dict[str, tuple[torch.dtype, tuple[int, ...], Read]]) -> dict[str, Made]:
    """Return the tensors by the names of a release. Each must have the model's shape, and none may be left over."""
    by_name = {canonical(name): name for name in found}
    expected, family = shapes(config), families.of(config)
    optional = {name for name, tensor in family.tensors(facts_from_hf(config)).items() if tensor.kind == COPY}
    made, used, missing, wrong = dict[str, Made](), set[str](), [], []
    for name, shape in expected.items():
        short = canonical(name)
        expert, offsets, sizes = EXPERT.fullmatch(short), (0,) * len(shape), shape
        if short not in by_name and expert:
            is_down = expert["part"] == "down"
            short = f"{expert['stack']}.{'down' if is_down else 'gate_up'}_proj"
            offsets = (int(expert["number"]), shape[0] if expert["part"] == "up" else 0, 0)
            sizes = (1, *shape)
        if short not in by_name:
            missing += [] if name in optional else [name]
            continue
        dtype, stored, read = found[by_name[short]]
        used.add(by_name[short])
        end = tuple(first + size for first, size in zip(offsets, sizes, strict=True))
        if len(stored) != len(sizes) or (sizes == shape and stored != shape) or any(map(int.__gt__, end, stored)):
            wrong.append(f"{by_name[short]} is {list(stored)} and {name} should be {list(shape)}")
            continue
        made[name] = Made(dtype, shape, partial(_whole, read, offsets, sizes, shape))
    extra = [name for name in found if name not in used and not COMPUTED.search(name)]
    if config.get("tie_word_embeddings"):
        extra = [name for name in extra if canonical(name) != "lm_head.weight"]
    problems = {released.MISSING: missing, released.EXTRA: extra, released.MISSHAPEN: wrong}
    released.require_none(folder, problems)
    return made


def _whole(read: Read, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return read(offsets, sizes).reshape(shape).contiguous()


def _of_megatron(folder: Path, config: dict, stored: torch_dist.Stored) -> dict[str, Made]:
    """Import Megatron-Bridge for this family, and only then the module that needs it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no GPU is used
    device.start()
    from trainer.megatron.model import open_folder

    bridge = open_folder(folder, config)
    from trainer.weights.adopted import megatron

    return megatron.tensors(folder, config, bridge, stored)
