"""Weights in 4 bits of sign, exponent and one digit (e2m1: 0 to 6), whose groups in a row share a scale.

    nvfp4(weight) -> codes, scales, factor     groups of 16, scales in e4m3, and a factor in fp32 for the whole matrix
    mxfp4(weight) -> codes, scales             groups of 32, scales that are powers of 2, by their exponent (e8m0)

A byte has two codes, the even column's in the low bits. Nothing is calibrated. NVFP4 is like ModelOpt's: the factor is
the matrix's largest value over 6 * 448, and a group's scale is its largest value over 6 and the factor, rounded to
e4m3. A scale of MXFP4 is the smallest without clipping. Values are rounded to the nearest code, ties to even.
"""

import torch

from trainer.weights.quantised.pack import divided, largest_of_blocks

NVFP4, MXFP4 = 16, 32  # values of a row that share a scale
TOP, TOP_OF_SCALES = 6.0, 448.0
LEAST = 2.0**-9  # of e4m3
NOTHING = 1e-30  # a matrix with a smaller maximum counts as zeros
BIAS = 127  # of e8m0's exponents


def nvfp4(weight: torch.Tensor, top: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and factor; the factor is that of a larger matrix if `top` is its largest value."""
    largest = largest_of_blocks(weight.float(), (1, NVFP4))
    top = largest.amax() if top is None else top
    factor = torch.where(top > NOTHING, divided(top, TOP * TOP_OF_SCALES), 1.0)
    scales = largest / (TOP * factor)
    scales = torch.where(scales > 0, scales, 1.0).clamp(LEAST, TOP_OF_SCALES).to(torch.float8_e4m3fn)
    return _codes(weight, scales.float() * factor, NVFP4), scales, factor


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = largest_of_blocks(weight.float(), (1, MXFP4))
    digits, exponents = torch.frexp(divided(largest, TOP))  # digits are from 0.5 up to 1
    exponents = (exponents - (digits == 0.5).int()).clamp(1 - BIAS, BIAS)
    exponents = torch.where(digits > 0, exponents, 0)
    scales = torch.exp2(exponents.float())
    return _codes(weight, scales, MXFP4), (exponents + BIAS).to(torch.uint8)


def next_to(numbers: torch.Tensor) -> torch.Tensor:
    """Return the codes closest to values divided by their scales; zeros keep their sign.

    Codes are 0.5 apart up to 2, 1 apart up to 4, and 2 apart up to 6. round() takes ties to the even code, as all three
    begin with one. This is four times as fast on a CPU as a search between the codes.
    """
    sizes = numbers.abs()
    codes = (sizes * 2).clamp_(max=4).round_()
    codes += sizes.clamp(2, 4).round_() - 2
    codes += (sizes / 2).clamp_(2, 3).round_() - 2
    codes += 4 - torch.copysign(torch.full_like(codes, 4), numbers)  # 8 if the sign is set
    return (codes[:, ::2] + codes[:, 1::2] * 16).to(torch.uint8)


def _codes(weight: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    scaled = weight.float() / scales.repeat_interleave(group, 1)[:, : weight.shape[1]]
    return next_to(torch.where(scaled == 0, 0.0, scaled))  # a zero has no sign
