"""Codes and scales of a quantised release as they are, for a packed base in the same format.

A base holds numbers, and rows in another order than the release. The released scales, put in that order, give the
released codes back to the last bit: a number over its scale is next to its code, as rounding to bf16 moves it by
far less than codes are apart. That is tried of every part, and a part of which it is not so is packed anew.
"""

from functools import cached_property
from typing import Any

import torch

from conf.model_files.quantization import Packed
from conf.rules.packed_base import Format
from contract.faults import Fault
from trainer.megatron.packed_base.codes import SCALES
from trainer.weights import released_tensors
from trainer.weights.released import Model


class Scales:
    """Scales of a Megatron weight's rows, for each block of columns, and how many rows share them."""

    def __init__(self, rows: torch.Tensor, source: torch.Tensor, dtype: torch.dtype):
        self.rows, self.dtype = rows, dtype  # the type that the release is unpacked to
        self._source = source  # number of the released row of scales

    def height(self, matrices: int, most: int) -> int:
        """Rows of a block, if as many as possible have one row of scales in each of these matrices."""
        of_matrices = self._source.view(matrices, -1)
        while most > 1 and not all(bool((part == part[:, :1]).all()) for part in of_matrices.split(most, 1)):
            most //= 2
        return most


class Release:
    """Released scales by the names of Megatron's weights."""

    def __init__(self, model: Model, form: Format, registry: Any, config: Any):
        self.model, self.form, self.registry, self.config = model, form, registry, config
        self._last: tuple[str, Scales | None] = "", None

    @cached_property
    def names(self) -> set[str]:
        """Released weights in the format that is asked for."""
        return {name for name, packed in self.model.packed.items() if is_same(packed, self.form)}

    def scales(self, name: str, rows: int) -> Scales | None:
        """Scales of this weight's rows; None where not all that it is made of is released in this format."""
        if self._last[0] != name:
            self._last = name, self._found(name, rows)
        return self._last[1]

    def _found(self, name: str, rows: int) -> Scales | None:
        from trainer.weights import mapping  # which imports Megatron-Bridge

        try:
            parts = mapping.parts(self.registry, name) if self.names else None
        except Fault:  # of a mapping that is not known by rows
            return None
        if not parts or any(part.name not in self.names or part.turned or part.expert is not None for part in parts):
            return None
        of_rows, source, begin, dtype = {}, torch.full((rows,), -1), 0, torch.float32
        for part in parts:
            packed = self.model.packed[part.name]
            scales = released_tensors.scales_of(self.model, packed).float()
            if not torch.equal(scales.to(SCALES[self.form.kind]).float(), scales):
                return None  # its type holds more than the format's does
            numbers = part.rows(torch.arange(rows), self.config)
            if len(numbers) != packed.shape[0]:
                return None
            source[numbers] = begin + torch.arange(len(numbers)) // self.form.block[0]
            of_rows[begin] = scales
            begin, dtype = begin + len(scales), released_tensors.DTYPES[packed.dtype]
        if (source < 0).any() or len({scales.shape[1] for scales in of_rows.values()}) > 1:
            return None
        return Scales(torch.cat([*of_rows.values()])[source], source, dtype)


def is_same(packed: Packed, form: Format) -> bool:
    """Whether a release's weight has the codes and the blocks of this format."""
    scheme = packed.scheme
    return (scheme.kind, scheme.bits, scheme.block) == (form.kind, form.bits, form.block)


def codes(
    form: Format, scales: Scales, read: torch.Tensor, offsets: tuple[int, int], block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Codes of a box of a Megatron weight at this place, and scales of its blocks; None if others would be needed."""
    (top, left), (rows, columns) = offsets, read.shape
    of_rows = scales.rows[top : top + rows].to(read.device)
    spread = of_rows[:, (torch.arange(columns, device=read.device) + left) // form.block[1]]
    numbers = read.float() / spread
    if form.kind == "fp8":
        found = numbers.to(torch.float8_e4m3fn)
        whole = found.float()
    else:
        whole = numbers.round().clamp(-8, 7)
        above = (whole + 8).to(torch.uint8)
        found = above[:, ::2] | above[:, 1::2] << 4
    if not torch.equal((whole * spread).to(scales.dtype).to(read.dtype), read):
        return None
    places = torch.arange(0, columns, block[1], device=read.device) + left
    return found, of_rows[:: block[0]][:, places // form.block[1]].to(SCALES[form.kind])
