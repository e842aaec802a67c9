"""Vectors of length 1."""

import torch


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    numbers = x.float()
    return (numbers * torch.rsqrt((numbers * numbers).sum(-1, keepdim=True) + eps)).to(x.dtype)
