"""Patch for megatron-core's Mamba-2 layer: it uses flash-linear-attention instead of mamba_ssm and causal_conv1d.

Neither of the two is in the lock. On a CPU the package is the stand-in of trainer/startup/cpu. The layer's parameters,
and how they are cut over ranks, are core's. Core's norm of the output has a fixed epsilon. Remove when core needs no
more packages than this project has.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportFunctionMemberAccess=false, reportIncompatibleMethodOverride=false, reportCallIssue=false

from types import SimpleNamespace

import torch
from megatron.core import jit
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus

from trainer.patches import versions
from trainer.patches.families import delta_kernels, delta_nets, row_ends
from trainer.startup.cpu.stand_in.fla.ops import simple_gla

delta_nets.show_package()
from fla.modules.convolution import causal_conv1d  # noqa: E402
from fla.ops.simple_gla import chunk_simple_gla  # noqa: E402

scan = delta_kernels.by_size(chunk_simple_gla, simple_gla.chunk_simple_gla, value=64)


@jit.jit_fuser
def gated(y: Tensor, x: Tensor, skip: Tensor, z: Tensor) -> Tensor:
    """Add the input of each head, and multiply by the gate: one kernel on a GPU."""
    return ((y + skip[:, None] * x).flatten(2).float() * silu(z.float())).to(x.dtype)


class GroupNorm(nn.Module):
    """RMSNorm of each group of heads."""

    def __init__(self, width: int, eps: float, group_size: int, norm_before_gate: bool, device, dtype):
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        groups = rms_norm(x.unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps)
        return self.weight * groups.flatten(-2).to(self.weight.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets, **groups
        )


class Mamba(mamba_mixer.MambaMixer):
    """Core's layer in the place of attention."""

    def __init__(self, config, submodules, layer_number, pg_collection, d_conv, least_step, name=None, **_unused):
        super().__init__(
            config,
            submodules,
            config.hidden_size,
            d_conv=d_conv,
            layer_number=layer_number,
            pg_collection=pg_collection,
            name=name,
        )
        self.norm.eps = config.layernorm_epsilon
        self.least_step = least_step
        self.in_proj_split_names = ["z", "x", "B", "C", "dt"]
        self.in_proj_split_sections = self.in_proj.weight.partition_sizes

    def forward(self, hidden_states, attention_mask=None, packed_seq_params=None, **_unused):
        return super().forward(hidden_states, packed_seq_params=packed_seq_params)

    def _ssm_training(self, zxBCdt, packed_seq_params=None):
        part, packed = self.cp, packed_seq_params or SimpleNamespace(cu_seqlens_q_padded=None, cu_seqlens_q=None)
        ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        inner, keys = part.d_inner_local_tpcp, part.ngroups_local_tpcp * self.d_state
        z, xBC, dt = zxBCdt.transpose(0, 1).split([inner, inner + 2 * keys, part.nheads_local_tpcp], -1)
        weight, bias = part.get_conv1d_weight().squeeze(1), part.get_conv1d_bias()
        xBC, _ = causal_conv1d(x=xBC.contiguous(), weight=weight, bias=bias, activation="silu", cu_seqlens=ends)
        x, B, C = xBC.split([inner, keys, keys], -1)
        x = x.unflatten(-1, (-1, self.headdim))
        shape = (*x.shape[:2], part.ngroups_local_tpcp, x.shape[2] // part.ngroups_local_tpcp, self.d_state)
        B, C = (y.unflatten(-1, (-1, 1, self.d_state)).expand(shape).flatten(2, 3) for y in (B, C))
        dt = softplus(dt.float() + part.get_dt_bias().float()).clamp(min=self.least_step)
        decay = -part.get_A_log().float().exp() * dt
        y, _ = scan(C, B, (x * dt[..., None]).to(x.dtype), g=decay, scale=1.0, cu_seqlens=ends)
        y = gated(y, x, part.get_D(), z).transpose(0, 1).contiguous()
        return self.norm(part.post_conv_ssm(y, packed_seq_params))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return core's, with the module's names of weights. Core also reads in_proj.weight, which merges adapters."""
        metadata, own = ensure_metadata_has_dp_cp_group(metadata), {}
        self._save_to_state_dict(own, "", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        sharded = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups)
        for name, module in self.named_children():
            place = f"{prefix}{name}."
            sharded |= sharded_state_dict_default(module, place, sharded_offsets, metadata, tp_group=self.tp_group)
        for name, of in ("in_proj.weight", slice(5)), ("conv1d_weight", slice(1, 4)), ("conv1d_bias", slice(1, 4)):
            sizes, names = self.in_proj_split_sections[of], self.in_proj_split_names[of]
            sharded[prefix + name] = _split_tensor_factory(sharded[prefix + name], sizes, names, 0)
        return sharded


def install() -> None:
    versions.check(__name__)
    delta_kernels.choose_configurations()
    row_ends.install()
    mamba_mixer.HAVE_MAMBA_SSM = True
    mamba_mixer.ExtendedRMSNorm = GroupNorm
