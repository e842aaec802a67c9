"""Weights as codes and scales, in the format of a release: the inverse of unpack.py.

    pack(packed, weight) -> codes, scales      for a weight that was never quantised; values go to the nearest code

For a trained weight in FP8, change() returns codes and scales close to the released ones:

- A value that training did not change keeps its code.
- A changed value is rounded up or down at random. The probability of rounding up is the value's relative distance from
  the lower code. Rounding to the nearest code would restore the old code, because an adapter changes a weight by a
  hundredth or less, but FP8's codes are 6 to 12 % apart. Random rounding keeps the sum of many values, and adds noise.
- If a value of a block is too large for the scale, the scale is doubled until it fits. Other FP8 codes stay exact.

The random numbers depend on the weight's name, so the same training gives the same bytes. In 4 bits the noise would be
19 % of a weight, for a change of half a percent (FP8: 2 %), so change() does not support 4 bits.
"""

# pyright: reportArgumentType=false

import zlib
from dataclasses import astuple, dataclass, replace
from typing import Self

import torch

from conf.model_files.quantization import Packed, Scheme
from trainer.weights.quantised.unpack import spans, spread

FP8 = torch.finfo(torch.float8_e4m3fn)
MANTISSA, LOWEST = 3, -6  # bits of FP8's mantissa, and its smallest normal exponent


class Squares:
    """Base class for sums of squares, which are added field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*(left + right for left, right in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Loss(Squares):
    """Sums of squares over the values of trained weights, in fp32."""

    weight: float = 0.0
    error: float = 0.0  # of the codes' values minus the trained weight
    change: float = 0.0  # of the trained weight minus the released one
    kept: float = 0.0  # product of that change and of the codes'

    @property
    def relative(self) -> float:
        """Return the error of rounding relative to the weight."""
        return (self.error / self.weight) ** 0.5 if self.weight else 0.0

    @property
    def share(self) -> float:
        """Return the share of training's change that the codes keep."""
        return self.kept / self.change if self.change else 1.0


def pack(packed: Packed, weight: torch.Tensor, kind: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes closest to a weight's values, and scales that this type can represent."""
    scheme = packed.scheme
    largest, (low, top) = largest_of_blocks(weight.float(), scheme.block), _range(scheme)
    scales = torch.where(largest > 0, divided(largest, top), 1.0).to(kind).float()
    numbers = weight.float() / spread(scales, packed, 0, packed.shape[0])
    if scheme.kind == "int":
        return _joined(numbers.round().clamp(low, top).int(), scheme), scales
    return numbers.clamp(low, top).to(torch.float8_e4m3fn), scales


def change(
    name: str, packed: Packed, codes: torch.Tensor, scales: torch.Tensor, by: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Loss]:
    """Return codes and scales of a released weight that training changed by `by`, and the loss."""
    scheme, kind = packed.scheme, scales.dtype
    assert scheme.kind == "fp8"
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    new_codes, new_scales, loss = codes.clone(), scales.clone(), Loss()
    height = scheme.block[0]
    for start, stop in spans(packed, 0, packed.shape[0]):
        rows = slice(start // height, -(-stop // height))
        before = codes[start:stop].float()
        of_span = replace(packed, shape=(stop - start, packed.shape[1]))
        old = spread(scales.float()[rows], of_span, 0, stop - start)
        target = before * old + by[start:stop]
        outgrown = largest_of_blocks(target, scheme.block) / (scales.float()[rows] * FP8.max)
        times = torch.exp2(outgrown.clamp(min=1).log2().ceil())
        factor = spread(times, of_span, 0, stop - start)
        rounded = _rounded(before / factor + by[start:stop] / (old * factor), random)
        new_scales[rows] = (scales.float()[rows] * times).to(kind)
        kept = (by[start:stop] == 0) & (factor == 1)
        rounded = torch.where(kept, before, rounded)
        held = rounded * old * factor
        loss += _loss(target, held, before * old, by[start:stop])
        new_codes[start:stop] = rounded.to(codes.dtype)
    return new_codes, new_scales, loss


def _loss(target: torch.Tensor, written: torch.Tensor, before: torch.Tensor, by: torch.Tensor) -> Loss:
    def product(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.double() * other.double()).sum())

    error = written - target
    return Loss(product(target, target), product(error, error), product(by, by), product(written - before, by))


def _rounded(numbers: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Round each value to one of the two neighbouring FP8 codes, the closer one more often."""
    exponent = torch.frexp(numbers).exponent - 1
    steps = torch.exp2((exponent.clamp(min=LOWEST) - MANTISSA).float())
    below = (numbers / steps).floor()
    up = torch.rand(numbers.shape, generator=random) < numbers / steps - below
    return ((below + up) * steps).clamp(FP8.min, FP8.max)


def _range(scheme: Scheme) -> tuple[float, float]:
    if scheme.kind == "int":
        return -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1
    return FP8.min, FP8.max


def divided(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """Divide as on a CPU: on a GPU torch multiplies by the reciprocal if the divisor is not a tensor."""
    return numbers / torch.full_like(numbers, by)


def largest_of_blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest magnitude of each block; the last blocks may be shorter."""
    rows, columns = weight.shape
    height, width = min(block[0], rows), min(block[1], columns)
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % width, 0, -rows % height))
    return whole.view(-(-rows // height), height, -(-columns // width), width).amax((1, 3))


def _joined(numbers: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Pack integers, as many as 32 bits hold."""
    each = 32 // scheme.bits
    apart = (numbers + 2 ** (scheme.bits - 1)).view(numbers.shape[0], -1, each)
    places = torch.arange(0, each * scheme.bits, scheme.bits, dtype=torch.int32, device=numbers.device)
    return (apart << places).sum(-1, dtype=torch.int32)
