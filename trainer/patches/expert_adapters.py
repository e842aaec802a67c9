"""Patch of the adapter per expert: correct also if experts are cut over several ranks.

Megatron-Bridge's adapter per expert is silently wrong under expert tensor parallelism. On fc1 it gathers the hidden
values outside autograd, so A gets no gradient. On fc2 each rank multiplies only its part of the hidden values, and the
dispatcher then adds up copies of the result. ExpertAdapter fixes both.

When Bridge merges or exports fc1's adapter, it takes the first half of B's rows for gate, but each rank has rows of
both.

Remove when Bridge does the same; benchmarks/layouts.py, tests/trainer/test_train.py and (for merging)
tests/trainer/megatron/test_lean_adapters.py check it.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge
from megatron.bridge.peft import lora
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import nn

from trainer.patches import versions
from trainer.patches.shared_experts import Hidden

SPLIT = MegatronPeftBridge._split_fused_fc1_linear_out_weight


def install() -> None:
    """Let Bridge's LoRA use the adapters of this module."""
    versions.check(__name__)
    lora.GroupedExpertLinearAdapter = ExpertAdapter
    MegatronPeftBridge._split_fused_fc1_linear_out_weight = _gate_and_up


class ExpertAdapter(GroupedExpertLinearAdapter):
    """One low-rank pair per expert, correct also if each expert is cut over several ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.input_is_parallel and self.expert_tp_group is not None and self.expert_tp_group.size() > 1:
            self.activation = Hidden(self.expert_tp_group, of_parts=True)  # fc2: Bridge's activation is between A and B

    def _gather_along_last_dim(self, tensor):
        group = self.expert_tp_group
        if group is None or group.size() == 1:
            return tensor
        if not self.input_is_parallel:
            return mappings.all_gather_last_dim_from_tensor_parallel_region(tensor, group=group)
        # fc2: the dispatcher sums the ranks' outputs, so a rank sets the columns of the others to 0.
        width = tensor.shape[-1]
        return nn.functional.pad(tensor, (group.rank() * width, (group.size() - 1 - group.rank()) * width))


def _gate_and_up(self, linear_out_weight, *, is_expert: bool):
    """Return the rows of gate and of up; each rank of an expert has a part of both."""
    ways = parallel_state.get_expert_tensor_parallel_world_size() if is_expert else 1
    if ways == 1:
        return SPLIT(self, linear_out_weight, is_expert=is_expert)
    parts = linear_out_weight.view(ways, 2, -1, linear_out_weight.shape[-1])
    return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)
