"""Writer of a model in Hugging Face's format whose tensors are made one after another."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from conf.model_files.safetensors_header import BITS
from trainer.weights import new_safetensors
from trainer.weights.drawn.new_folder import new_folder
from trainer.weights.released_tensors import CODES, DTYPES, as_bytes

TYPES = DTYPES | CODES
NAMES = {dtype: name for name, dtype in TYPES.items()}
COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}  # endings of files that describe a model


@dataclass(frozen=True)
class Made:
    """A tensor of the model, made when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write(source: Path, tensors: dict[str, Made], out: Path) -> None:
    """Write the tensors, and copy the files of `source` that describe the model."""
    sizes = {name: made.size for name, made in tensors.items()}
    shards = new_safetensors.shards(sizes)
    with new_folder(out) as partial:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in COPIED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        for file, part in shards.items():
            described = {name: (_name(tensors[name].dtype), tensors[name].shape) for name in part}
            with (partial / file).open("wb") as f:
                f.write(new_safetensors.header(file, described)[0])
                for name in part:
                    tensor = tensors[name].make()
                    assert (tensor.shape, tensor.dtype) == (tensors[name].shape, tensors[name].dtype), name
                    f.write(as_bytes(tensor))
        if len(shards) > 1:
            files = {name: file for file, part in shards.items() for name in part}
            new_safetensors.write_index(partial, sum(sizes.values()), files)


def _name(dtype: torch.dtype) -> str:
    name = NAMES[dtype]
    assert name in BITS
    return name
