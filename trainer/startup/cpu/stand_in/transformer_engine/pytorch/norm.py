"""LayerNorm and RMSNorm with the attribute that makes Megatron sum their gradients over sequence-parallel ranks."""

import torch
from torch import nn


class WithoutFP8(nn.Module):
    """Module whose state of FP8 is empty. Every checkpoint has its key."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


def set_norm(module: nn.Module, prefix: str, kind: str, *shape, **make) -> None:
    """Give a module the parameters of a norm, <prefix>weight and <prefix>bias, which is None for RMSNorm."""
    fill = torch.zeros if module.zero_centered_gamma else torch.ones
    weight = nn.Parameter(fill(*shape, **make))
    bias = nn.Parameter(torch.zeros(*shape, **make)) if kind == "LayerNorm" else None
    for name, parameter in (("weight", weight), ("bias", bias)):
        setattr(module, prefix + name, parameter)
        if parameter is not None:
            parameter.sequence_parallel = module.sequence_parallel


def normalize(module: nn.Module, prefix: str, x):
    """The norm, computed in fp32 and returned in the input's type, as in the CUDA kernels."""
    weight, bias = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias")
    gamma = weight.float() + 1 if module.zero_centered_gamma else weight.float()
    wide = x.float()
    if bias is None:
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps) * gamma
    else:
        out = nn.functional.layer_norm(wide, gamma.shape, gamma, bias.float(), module.eps)
    return out.to(x.dtype)


class _Norm(WithoutFP8):
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
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        set_norm(self, "", self.kind, normalized_shape, dtype=params_dtype, device=device)

    def forward(self, x):
        return normalize(self, "", x)


class LayerNorm(_Norm):
    kind = "LayerNorm"


class RMSNorm(_Norm):
    kind = "RMSNorm"
