"""Codes and scales of a quantised release, reused for a packed base in the same format.

A base holds unpacked values, in another row order than the release. With the released scales in that order, the
released codes are recovered exactly: a value divided by its scale is close to its code, because rounding to bf16
changes it much less than codes differ. This is verified for every part; parts that fail are packed again.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from conf.model_files.quantization import E2M1, Packed
from conf.rules.packed_base import Format, is_same
from contract.faults import Fault
from trainer.megatron.packed_base import codes as of_codes
from trainer.weights import released_tensors
from trainer.weights.packed_base.part import Pair
from trainer.weights.quantised import e2m1
from trainer.weights.released import Model


@dataclass(frozen=True)
class Scales:
    """Scales of a Megatron weight's rows, for each block of columns, and how many rows share them."""

    rows: torch.Tensor  # in the format's type
    source: torch.Tensor  # index of the released row of scales
    dtype: torch.dtype  # of the unpacked release
    factors: torch.Tensor | None = None  # of each row's scales, in formats with factors

    def factor(self, number: int, matrices: int) -> torch.Tensor | None:
        """Return the factor of the scales of one of these matrices; None if its rows have several."""
        if self.factors is None:
            return None
        rows = self.factors.view(matrices, -1)[number]
        return rows[0] if bool((rows == rows[0]).all()) else None

    def height(self, matrices: int, most: int) -> int:
        """Return the largest block height (a divisor of `most` by powers of 2) that has one row of scales in each
        block.
        """
        of_matrices = self.source.view(matrices, -1)
        while most > 1 and not all(bool((part == part[:, :1]).all()) for part in of_matrices.split(most, 1)):
            most //= 2
        return most

    def codes(
        self, form: Format, read: torch.Tensor, offsets: Pair, block: Pair, factor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return codes of a box of a Megatron weight and scales of its blocks; None if the released ones do not fit."""
        (top, left), (rows, columns) = offsets, read.shape
        of_rows = self.rows[top : top + rows].to(read.device)
        columns_of = (torch.arange(columns, device=read.device) + left) // form.block[1]
        in_fp32 = of_codes.in_fp32(of_rows) if factor is None else of_codes.in_fp32(of_rows) * factor
        spread = in_fp32[:, columns_of]
        result = _codes(form, read, spread)
        whole = of_codes.numbers(result, form.kind) * spread
        if not torch.equal(whole.to(self.dtype).to(read.dtype), read):
            return None
        places = torch.arange(0, columns, block[1], device=read.device) + left
        return result, of_rows[:: block[0]][:, places // form.block[1]]


class Release:
    """Released scales by the names of Megatron's weights."""

    def __init__(self, model: Model, form: Format, registry: Any, config: Any):
        self.model, self.form, self.registry, self.config = model, form, registry, config
        self._last: tuple[tuple[str, int] | None, Scales | None] = None, None

    @cached_property
    def names(self) -> set[str]:
        """Return the released weights in this format."""
        return {name for name, packed in self.model.packed.items() if is_same(packed.scheme, self.form)}

    def scales(self, name: str, rows: int, begin: int, count: int) -> Scales | None:
        """Return the scales of `count` of this weight's rows; None unless all of these are released in this format."""
        last = self._last  # a copy, because several threads may call this
        if last[0] != (name, begin):
            self._last = last = (name, begin), self._found(name, rows, slice(begin, begin + count))
        return last[1]

    def _found(self, name: str, rows: int, wanted: slice) -> Scales | None:
        from trainer.weights import mapping  # imports Megatron-Bridge

        try:
            parts = mapping.parts(self.registry, name) if self.names else None
        except Fault:  # the mapping is not by rows
            return None
        # Rows of codes are Megatron's rows, also in a stack, whose weights are transposed.
        parts = [part for part in parts or () if part.name in self.names]
        if not parts or any(part.turned != (part.expert is not None) for part in parts):
            return None
        of_rows, source, begin, dtype = {}, torch.full((rows,), -1), 0, torch.float32
        factors = torch.ones(rows) if self.form.factor_bytes else None
        for part in parts:
            packed, kind = self.model.packed[part.name], of_codes.SCALES[self.form.kind]
            released = part.of(released_tensors.at(self.model.folder, self.model.tensors[packed.scales]))
            scales = released.to(kind)
            if scales.dtype != released.dtype and not torch.equal(scales.float(), released.float()):
                return None  # the released type is more precise than the format's
            numbers = part.rows(torch.arange(rows), self.config)
            if len(numbers) != part.shape(packed.shape)[0]:
                return None
            if factors is not None:
                factors[numbers] = _factor(self.model, packed)
            source[numbers] = begin + torch.arange(len(numbers)) // self.form.block[0]
            of_rows[begin] = scales
            begin, dtype = begin + len(scales), released_tensors.DTYPES[packed.dtype]
        source = source[wanted]
        if (source < 0).any() or len({scales.shape[1] for scales in of_rows.values()}) > 1:
            return None
        factors = None if factors is None else factors[wanted]
        return Scales(torch.cat([*of_rows.values()])[source], source, dtype, factors)


def _factor(model: Model, packed: Packed) -> torch.Tensor:
    """Return the factor of a weight's scales. A divisor becomes its reciprocal, or a neighbour with the same results.

    Division is not always bit-identical to multiplication with the reciprocal. But products with codes are rounded to
    the type of the weights, and there are few of them: some value next to the reciprocal gives all of them.
    """
    factor = released_tensors.at(model.folder, model.tensors[packed.factor]).reshape(()).clone()
    if not packed.scheme.divides:
        return factor
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    dtype = released_tensors.DTYPES[packed.dtype]
    products = lambda spread: (torch.tensor(E2M1)[:, None] * spread).to(dtype)  # noqa: E731
    near = (1 / factor).view(torch.int32)
    for step in (0, 1, -1, 2, -2, 3, -3):
        candidate = (near + step).view(torch.float32)
        if torch.equal(products(scales * candidate), products(scales / factor)):
            return candidate
    return 1 / factor  # parts whose products differ are packed again


def _codes(form: Format, read: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return the codes closest to these values."""
    numbers = read.float() / spread
    if form.kind == "fp8":
        return numbers.to(torch.float8_e4m3fn)
    if form.kind == "int":
        above = (numbers.round().clamp(-8, 7) + 8).to(torch.uint8)
        return above[:, ::2] | above[:, 1::2] << 4
    return e2m1.next_to(numbers)
