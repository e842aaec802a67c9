"""Patches of adapters of experts: correct also if experts are cut over several ranks, or copied to them.

One adapter per expert. Megatron-Bridge's adapter per expert is silently wrong under expert tensor parallelism. On fc1
it gathers the hidden values outside autograd, so A gets no gradient. On fc2 each rank multiplies only its part of the
hidden values, and the dispatcher then adds up copies of the result. ExpertAdapter fixes both. When Bridge merges or
exports fc1's adapter, it takes the first half of B's rows for gate, but each rank has rows of both.

One adapter that all experts of a layer share. Bridge keeps a copy of it on each expert-parallel rank: it broadcasts the
first copy's values and sums the gradients, so all copies stay equal. On a tiny MoE in fp32 without gradient clipping,
losses at ep 1, 2 and 4 then agree to 2e-7. Two bugs remained, both silent. The norm of all gradients counted every
copy: 5 to 20 % too large at ep 2 and 4, and clipping was wrong with it; count_once() counts one. Under expert tensor
parallelism the adapter had the same bugs as the one per expert, also if experts are not grouped: fc1's A got its
gradient from one rank's columns of B alone. Losses were off by 1.6 % after ten steps at etp 2. SharedAdapter fixes
this. Bridge also saves the adapter once for each expert: 256 equal copies of A, B and the optimizer's states for
Qwen3.5-35B, for which training stood still for 15 s. SharedAdapter saves it once.

Remove each part when Bridge does the same; benchmarks/layouts.py (also its rows "shared"), tests/trainer/test_train.py
and (for merging) tests/trainer/megatron/test_lean_adapters.py check them.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py
"""

# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false, reportOptionalMemberAccess=false

import importlib

from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge
from megatron.bridge.peft import lora
from megatron.bridge.peft.utils import GroupedExpertLinearAdapter, ParallelLinearAdapter
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trainer.patches import versions

SPLIT = MegatronPeftBridge._split_fused_fc1_linear_out_weight


def install() -> None:
    """Let Bridge's LoRA use this module's adapter per expert."""
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
        return _own_columns(tensor, group)


def _gate_and_up(self, linear_out_weight, *, is_expert: bool):
    """Return the rows of gate and of up; each rank of an expert has a part of both."""
    ways = parallel_state.get_expert_tensor_parallel_world_size() if is_expert else 1
    if ways == 1:
        return SPLIT(self, linear_out_weight, is_expert=is_expert)
    parts = linear_out_weight.view(ways, 2, -1, linear_out_weight.shape[-1])
    return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)


def install_shared() -> None:
    """Let Bridge's LoRA use this module's adapter that experts share."""
    versions.check(__name__)
    lora.ParallelLinearAdapter = SharedAdapter


def sum_copies_once_a_step() -> None:
    """Make megatron-core sum gradients marked is_copied over expert-parallel ranks, once per step.

    Bridge sums the gradients of each shared adapter in every micro batch. The sum over expert-data-parallel ranks comes
    first: expert-parallel ranks then hold the same part of the distributed optimizer's shards.
    """
    versions.check(__name__)
    # By its name, as core has a function of the same name.
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finish = finalize._allreduce_non_tensor_model_parallel_grads
    if getattr(finish, "sums_copies", False):
        return

    def finish_and_sum(model, config, *args, **kwargs):
        finish(model, config, *args, **kwargs)
        _sum_copies(model)

    finish_and_sum.sums_copies = True
    finalize._allreduce_non_tensor_model_parallel_grads = finish_and_sum


def _sum_copies(model) -> None:
    group = parallel_state.get_expert_model_parallel_group()
    weights = [weight for chunk in model for weight in chunk.parameters() if getattr(weight, "is_copied", False)]
    if group.size() == 1 or not weights:
        return
    gradients = [weight.main_grad for weight in weights]
    whole = _flatten_dense_tensors(gradients)
    distributed.all_reduce(whole, group=group)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(whole, gradients), strict=True):
        gradient.copy_(summed)


def count_once(model) -> None:
    """Count the copies of one adapter on several expert-parallel ranks once in the norm of gradients."""
    versions.check(__name__)
    if parallel_state.get_expert_model_parallel_rank() == 0:
        return
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if isinstance(module, ParallelLinearAdapter) and module._uses_grouped_expert_sharding():
                for parameter in module.parameters():
                    parameter.shared = True  # Megatron leaves such a copy out of the norm


class SharedAdapter(ParallelLinearAdapter):
    """Bridge's adapter of one layer, correct also on experts that are cut over several ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ways = self.tp_group.size() if self.is_expert and self.tp_group is not None else 1
        if self.ways > 1:
            # Between A and B, ranks have parts of the gradient, and on fc2 parts of the value.
            self.activation = Hidden(self.tp_group, of_parts=self.input_is_parallel)
            self.linear_out.gather_output = False
        self.use_legacy_shared_expert_adapter_checkpoint = True  # no axis of experts in checkpoints

    def _set_expert_replica_ids(self, *states):
        super()._set_expert_replica_ids(*states)
        if self.ep_group is not None and self._uses_grouped_expert_sharding():
            count, rank = self.ep_group.size(), self.ep_group.rank()
            for piece in (piece for state in states for piece in state.values()):
                first, second, third = piece.replica_id
                piece.replica_id = (first, second * count + rank, third)

    def forward(self, x, *args, **kwargs):
        output = super().forward(x, *args, **kwargs)
        if self.ways == 1 or not self.input_is_parallel:
            return output
        return _own_columns(output, self.tp_group)


class Hidden(nn.Module):
    """Hidden values that the columns of B on all ranks multiply.

    Gradients are summed over ranks, and values too if each rank has a part.
    """

    def __init__(self, group, of_parts: bool):
        super().__init__()
        self.group, self.of_parts = group, of_parts

    def forward(self, x):
        if self.of_parts:
            x = mappings.reduce_from_tensor_model_parallel_region(x, group=self.group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.group)


def _own_columns(output, group):
    """Output of fc2 with 0 in the columns of the other ranks, because the dispatcher sums the outputs of all ranks."""
    width = output.shape[-1]
    return nn.functional.pad(output, (group.rank() * width, (group.size() - 1 - group.rank()) * width))
