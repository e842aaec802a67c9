"""LayerNorm and RMSNorm with the attribute that makes Megatron sum their gradients over sequence-parallel ranks."""

import torch
from torch import nn


def normalize(x, weight, bias, *, kind: str, eps: float, zero_centered_gamma: bool):
    """The norm, computed in fp32 and returned in the input's type, as in the CUDA kernels."""
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    wide = x.float()
    if kind == "RMSNorm":
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * gamma
    else:
        out = nn.functional.layer_norm(wide, gamma.shape, gamma, bias.float(), eps)
    return out.to(x.dtype)


class _Norm(nn.Module):
    kind: str

    def __init__(
        self,
        normalized_shape,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device=None,
        **_,
    ):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(fill(normalized_shape, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(normalized_shape, dtype=params_dtype, device=device))
            self.bias.sequence_parallel = sequence_parallel

    def forward(self, x):
        return normalize(
            x, self.weight, self.bias, kind=self.kind, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma
        )

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)  # FP8 has no state here, but the key is in every checkpoint

    def set_extra_state(self, state):
        pass


class LayerNorm(_Norm):
    kind = "LayerNorm"


class RMSNorm(_Norm):
    kind = "RMSNorm"
