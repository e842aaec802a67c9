"""A packed model whose products read the base's values instead of unpacking codes: for the loss that packing costs.

Each product reads its matrices from the base, or from the release that the base describes. Memory on the GPU is that of
training, because only one layer is unpacked at a time.
"""

# pyright: reportAttributeAccessIssue=false

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from trainer.megatron.packed_base import weight
from trainer.megatron.packed_base.codes import Codes, shape_of
from trainer.weights import torch_dist
from trainer.weights.packed_base.part import Part


@dataclass(frozen=True)
class Original(weight.Store):
    """The base's values of a layer, in the shape of its codes."""

    stored: torch_dist.Stored | None = None
    matrices: Sequence[Sequence[Part]] = ()

    def unpack(self) -> torch.Tensor:
        assert self.stored
        whole = torch.empty(shape_of(self.codes), dtype=self.dtype, device=self.codes.device)
        for target, parts in zip(whole, self.matrices, strict=True):
            for part in parts:
                rows = slice(part.start, part.start + part.sizes[0])
                target[rows].copy_(torch_dist.box(self.stored, part.name, part.offsets, part.sizes))
        return whole


@contextlib.contextmanager
def originals(stored: torch_dist.Stored, chunks: Sequence[Any]) -> Iterator[None]:
    """Replace the codes of all packed layers of a model by the base's values."""
    layers = [layer for chunk in chunks for layer in chunk.modules() if weight.PARTS in vars(layer)]
    weights = [(layer, one) for layer in layers for one in layer._parameters.values() if is_packed(one)]
    stores = [one.store for _, one in weights]
    for layer, one in weights:
        of_codes = {field.name: getattr(one.store, field.name) for field in fields(Codes)}
        one.store = Original(**of_codes, stored=stored, matrices=vars(layer)[weight.PARTS])
    try:
        yield
    finally:
        for (_, one), store in zip(weights, stores, strict=True):
            one.store = store


def is_packed(parameter: Any) -> bool:
    return isinstance(parameter, weight.PackedWeight)
