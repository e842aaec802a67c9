"""Patch for norms of queries and keys over all heads (OLMoE, MiniMax-M2): the same at any tensor parallelism.

Megatron-Bridge builds OLMoE's norms for the heads of one rank, and the released weights are too wide for them
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/olmoe/olmoe_provider.py). It cuts
MiniMax-M2's
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/minimax_m2/minimax_m2_provider.py),
and sums squares over ranks outside autograd, so a query's gradient lacks the contribution of the other ranks' heads.
Megatron-core sums the gradients of these weights over ranks by name, even of weights that are cut.

Here each rank holds the whole weight and uses its heads' part, so that sum is correct. Remove when Bridge sums squares
inside autograd, and core checks whether a weight is cut.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateImportUsage=false

import torch
from megatron.core import parallel_state
from torch.distributed.nn.functional import all_reduce

from trainer.patches import versions


class NormOverHeads(torch.nn.Module):
    """RMSNorm over the queries, or the keys, of all heads of all ranks."""

    def __init__(self, width: int, config, eps: float):
        super().__init__()
        self.eps, self.width = eps, width
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm x, of [token, row, head of this rank, width of a head]."""
        values = x.flatten(2).float()
        squares = values.pow(2).sum(-1, keepdim=True)
        first = 0
        if values.shape[-1] < self.width:
            group = parallel_state.get_tensor_model_parallel_group()
            squares, first = all_reduce(squares, group=group), group.rank() * values.shape[-1]
        normed = (values * torch.rsqrt(squares / self.width + self.eps)).to(x.dtype)
        return (self.weight[first : first + values.shape[-1]] * normed).view_as(x)


def of_queries(hidden_size: int, config, eps: float) -> NormOverHeads:
    """Make the norm of all heads; the caller passes the width of one head."""
    return NormOverHeads(config.num_attention_heads * hidden_size, config, eps)


def of_keys(hidden_size: int, config, eps: float) -> NormOverHeads:
    return NormOverHeads(config.num_query_groups * hidden_size, config, eps)


def install() -> None:
    """Build OLMoE and MiniMax-M2 with these norms."""
    versions.check(__name__)
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.minimax_m2 import minimax_m2_bridge, minimax_m2_provider
    from megatron.bridge.models.olmoe import olmoe_bridge

    minimax_m2_provider.FullDimQNorm, minimax_m2_provider.FullDimKNorm = of_queries, of_keys
    minimax_m2_bridge._FullDimQKNormMapping = AutoMapping
    olmoe_bridge.olmoe_layer_spec = minimax_m2_provider.minimax_m2_layer_spec
