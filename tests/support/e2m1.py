"""Numbers of 4 bits by their definition: a sign, two bits of exponent and a digit; and torch's types for scales."""

import torch


def weight(codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix in fp32 of codes of NVFP4, or of MXFP4, which has no factor."""
    found = numbers(codes)
    in_fp32 = scales.view(torch.float8_e8m0fnu).float() if factor is None else scales.float() * factor
    return found * in_fp32.repeat_interleave(32 if factor is None else 16, 1)[:, : found.shape[1]]


def numbers(codes: torch.Tensor) -> torch.Tensor:
    bits = torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()
    sign, exponent, digit = 1.0 - 2 * (bits >> 3), bits >> 1 & 3, (bits & 1) / 2
    return sign * torch.where(exponent == 0, digit, (1 + digit) * torch.exp2(exponent - 1.0))
