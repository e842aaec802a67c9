"""Weights as codes and scales, in the format of a release: the other way round of unpack.py.

    pack(packed, weight) -> codes, scales              of a weight that was never quantised; each number to the nearest

Of a trained weight in FP8, change() gives the codes and scales next to the released ones:

- A number that training left as it was keeps its code.
- A number that has changed is rounded up or down at random, up with the share of the way that it has gone from one code
  to the next. To the nearest, it would fall back to its code: what an adapter adds to a weight is a hundredth of it and
  less, and FP8's codes are 6 to 12 % apart. At random, what many numbers add up to is kept, and noise is added instead.
- A block that has outgrown its scale gets twice of it, as often as needed: FP8's codes of the others stay exact so.

The random numbers come from the weight's name, so the same training gives the same bytes. In 4 bits the noise would be
19 % of a weight, for a change of half a percent (FP8: 2 %), so change() is not of those.
"""

# pyright: reportArgumentType=false

import zlib
from dataclasses import dataclass

import torch

from conf.model_files.quantization import Packed, Scheme
from trainer.weights.quantised.unpack import spans, spread

FP8 = torch.finfo(torch.float8_e4m3fn)
MANTISSA, LOWEST = 3, -6  # bits of FP8's mantissa, and the exponent below which codes no longer come closer


@dataclass(frozen=True)
class Loss:
    """Sums of squares over the numbers of trained weights, in fp32."""

    weight: float = 0.0
    error: float = 0.0  # of what the codes say, from the trained weight
    change: float = 0.0  # of the trained weight, from the released one
    kept: float = 0.0  # product of that change and of the codes'

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(
            self.weight + other.weight,
            self.error + other.error,
            self.change + other.change,
            self.kept + other.kept,
        )

    @property
    def relative(self) -> float:
        """Error of rounding, as a share of the weight."""
        return (self.error / self.weight) ** 0.5 if self.weight else 0.0

    @property
    def share(self) -> float:
        """Share of what training has changed that the codes hold."""
        return self.kept / self.change if self.change else 1.0


def pack(packed: Packed, weight: torch.Tensor, kind: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes next to a weight's numbers, and scales that are numbers of this type."""
    scheme = packed.scheme
    largest = _largest_of_blocks(weight.float(), scheme)
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number, and a scale would be another than on a CPU.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, _top(scheme)), 1.0).to(kind).float()
    numbers = weight.float() / spread(scales, packed, 0, packed.shape[0])
    if scheme.kind == "int":
        return _joined(numbers.round().clamp(*_range(scheme)).int(), scheme), scales
    return numbers.clamp(FP8.min, FP8.max).to(torch.float8_e4m3fn), scales


def change(
    name: str, packed: Packed, codes: torch.Tensor, scales: torch.Tensor, by: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Loss]:
    """Codes and scales of a released weight that training has changed `by` so much, and what is lost on the way."""
    scheme, kind = packed.scheme, scales.dtype
    assert scheme.kind == "fp8"
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    new_codes, new_scales, loss = codes.clone(), scales.clone(), Loss()
    height = scheme.block[0]
    for start, stop in spans(packed, 0, packed.shape[0]):
        rows = slice(start // height, -(-stop // height))
        before = codes[start:stop].float()
        of_span = _span(packed, start, stop)
        old = spread(scales.float()[rows], of_span, 0, stop - start)
        target = before * old + by[start:stop]
        outgrown = _largest_of_blocks(target, scheme) / (scales.float()[rows] * _top(scheme))
        times = torch.exp2(outgrown.clamp(min=1).log2().ceil())
        factor = spread(times, of_span, 0, stop - start)
        found = _rounded(before / factor + by[start:stop] / (old * factor), random)
        new_scales[rows] = (scales.float()[rows] * times).to(kind)
        kept = (by[start:stop] == 0) & (factor == 1)
        found = torch.where(kept, before, found)
        held = found * old * factor
        loss += _loss(target, held, before * old, by[start:stop])
        new_codes[start:stop] = found.to(codes.dtype)
    return new_codes, new_scales, loss


def _span(packed: Packed, start: int, stop: int) -> Packed:
    return Packed(packed.scheme, (stop - start, packed.shape[1]), packed.codes, packed.scales)


def _loss(target: torch.Tensor, held: torch.Tensor, before: torch.Tensor, by: torch.Tensor) -> Loss:
    def product(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.double() * other.double()).sum())

    error = held - target
    return Loss(product(target, target), product(error, error), product(by, by), product(held - before, by))


def _rounded(numbers: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Each number as a code of FP8 on either side of it, the nearer one more often."""
    exponent = torch.frexp(numbers).exponent - 1
    steps = torch.exp2((exponent.clamp(min=LOWEST) - MANTISSA).float())
    below = (numbers / steps).floor()
    up = torch.rand(numbers.shape, generator=random) < numbers / steps - below
    return ((below + up) * steps).clamp(FP8.min, FP8.max)


def _range(scheme: Scheme) -> tuple[float, float]:
    if scheme.kind == "int":
        return -(2 ** (scheme.bits - 1)), 2 ** (scheme.bits - 1) - 1
    return FP8.min, FP8.max


def _top(scheme: Scheme) -> float:
    return _range(scheme)[1]


def _largest_of_blocks(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The largest number of each block; the last blocks may be shorter."""
    rows, columns = weight.shape
    height, width = min(scheme.block[0], rows), min(scheme.block[1], columns)
    whole = torch.nn.functional.pad(weight.abs(), (0, -columns % width, 0, -rows % height))
    return whole.view(-(-rows // height), height, -(-columns // width), width).amax((1, 3))


def _joined(numbers: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Integers put together, as many as 32 bits hold."""
    each = 32 // scheme.bits
    apart = (numbers + 2 ** (scheme.bits - 1)).view(numbers.shape[0], -1, each)
    places = torch.arange(0, each * scheme.bits, scheme.bits, dtype=torch.int32, device=numbers.device)
    return (apart << places).sum(-1, dtype=torch.int32)
