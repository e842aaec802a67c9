"""Patch of DoRA: the same result at every layout.

Megatron-Bridge computes the norm of a row-parallel weight over one rank's columns only; DoRALinear computes it over
all. Bridge also does not mark the magnitudes' gradients as partial (row-parallel) or cut (column-parallel) over ranks.
And it saves the magnitudes of a fused gate and up in each rank's order, so a resume at another tp mixed up gate and up.

Remove each part when Bridge does the same; benchmarks/layouts.py and tests/trainer/megatron/test_gradients.py check
them. https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/dora_layers.py
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import torch
from megatron.bridge.peft import dora, dora_layers
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

from trainer.patches import versions


def install() -> None:
    """Let Bridge's DoRA use the layers and adapters of this module."""
    versions.check(__name__)
    dora.DoRALinear, dora.ParallelLinearDoRAAdapter = DoRALinear, DoRAAdapter


def mark_magnitudes(model) -> None:
    """Mark magnitudes as partial or cut over ranks, for the sums and norms of their gradients."""
    versions.check(__name__)
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if not isinstance(module, dora_layers.DoRALinear):
                continue
            magnitude = module.adapter.weight_magnitude
            if module.adapter.input_is_parallel:  # whole; each rank processes its own tokens
                magnitude.sequence_parallel = module.to_wrap.config.sequence_parallel
            else:
                set_tensor_model_parallel_attributes(magnitude, True, 0, 1)


class DoRAAdapter(dora_layers.ParallelLinearDoRAAdapter):
    """DoRA's adapter.

    It saves the magnitudes of a fused gate and up like Bridge saves B: whole at any tp, gate first.
    """

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        state, key = super().sharded_state_dict(prefix, sharded_offsets, metadata), f"{prefix}weight_magnitude"
        if "linear_fc1" in self.base_linear_name and self.config.gated_linear_unit:
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class DoRALinear(dora_layers.DoRALinear):
    """DoRA whose norm covers whole rows of a weight that is cut over columns, and which does not scale the bias."""

    def forward(self, x):
        output, bias = super().forward(x)
        fused_bias = getattr(self.to_wrap, "bias", None)
        if bias is None and fused_bias is not None and fused_bias.numel() and self._adapter_enabled:
            # Bridge scales W x + b + B A x; DoRA's magnitudes apply to the weight only.
            output = output + fused_bias * (1 - self.adapter.get_weight_magnitude() / self._get_weight_norm())
        # Bridge makes [1, tokens, width] of [tokens, width], the shape in latent attention with packed sequences.
        return output.squeeze(0) if output.ndim > x.ndim else output, bias

    def _get_weight_norm(self):
        if not self.adapter.input_is_parallel:
            return super()._get_weight_norm()
        outer = mappings.gather_from_tensor_model_parallel_region(self.adapter.linear_out.weight.T).T
        weight = self.to_wrap.weight + self.scaling * outer @ self.adapter.linear_in.weight
        squares = weight.float().square().sum(1).detach()
        torch.distributed.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
        return squares.sqrt().to(weight.dtype)
