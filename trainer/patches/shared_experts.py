"""Patch of the one adapter for all experts of a layer that makes it the same model at every layout.

Megatron-Bridge keeps a copy of such an adapter on each expert-parallel rank: it broadcasts the first one's values
and adds up the gradients, so that all copies stay alike. Measured on a tiny MoE in fp32, that makes the same losses at
ep 1, 2 and 4 to 2e-7 where gradients are not clipped. Two things were still wrong, and nothing said so:

The norm of all gradients counted every copy: 5 to 20 % too large at ep 2 and 4, and clipping with it. count_once()
leaves one.

Under expert tensor parallelism the adapter was wrong as the one per expert is (expert_adapters.py), also
where experts are not grouped: fc2's ranks multiplied only their own part of the hidden values, and the dispatcher
added up copies of the result; fc1's A got its gradient from one rank's columns of B alone. Losses were off by 1.6 %
after ten steps at etp 2. Adapter repairs both.

Each can go when Bridge does the same; the rows "shared" of benchmarks/layouts.py hold them.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py
"""

# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false, reportOptionalMemberAccess=false

import importlib

from megatron.bridge.peft import lora
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings
from torch import distributed, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from trainer.patches import versions

WRITTEN_FOR = {"megatron-bridge": ("0.6.2",), "megatron-core": ("0.19.2",)}


def install() -> None:
    """Let Bridge's LoRA make adapters of this module."""
    versions.check(__name__, WRITTEN_FOR)
    lora.ParallelLinearAdapter = Adapter


def sum_copies_once_a_step() -> None:
    """Have megatron-core sum gradients that are marked is_copied over expert-parallel ranks, once a step.

    Bridge sums those of each adapter for all experts in every microbatch. Expert-data-parallel ranks are summed before:
    of what the distributed optimizer leaves to each rank, expert-parallel ranks have the same part.
    """
    versions.check(__name__, WRITTEN_FOR)
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # core has a function so named
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
    weights = [one for chunk in model for one in chunk.parameters() if getattr(one, "is_copied", False)]
    if group.size() == 1 or not weights:
        return
    gradients = [one.main_grad for one in weights]
    whole = _flatten_dense_tensors(gradients)
    distributed.all_reduce(whole, group=group)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(whole, gradients), strict=True):
        gradient.copy_(summed)


def count_once(model) -> None:
    """Let the copies of one adapter on several expert-parallel ranks count as one in the norm of gradients."""
    versions.check(__name__, WRITTEN_FOR)
    if parallel_state.get_expert_model_parallel_rank() == 0:
        return
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if isinstance(module, ParallelLinearAdapter) and module._uses_grouped_expert_sharding():
                for parameter in module.parameters():
                    parameter.shared = True  # Megatron's word for a copy that another rank counts


class Adapter(ParallelLinearAdapter):
    """Bridge's adapter of one layer, right also on experts that are cut over several ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ways = self.tp_group.size() if self.is_expert and self.tp_group is not None else 1
        if self.ways > 1:
            # Bridge's activation is between A and B: ranks have parts of the gradient there, and of the value on fc2
            self.activation = _Hidden(self.tp_group, of_parts=self.input_is_parallel)
            self.linear_out.gather_output = False

    def forward(self, x, *args, **kwargs):
        output = super().forward(x, *args, **kwargs)
        if self.ways == 1 or not self.input_is_parallel:
            return output
        # fc2: the dispatcher adds up the ranks' outputs, so a rank fills in its own columns and leaves the others 0.
        width, rank = output.shape[-1], self.tp_group.rank()
        return nn.functional.pad(output, (rank * width, (self.ways - 1 - rank) * width))


class _Hidden(nn.Module):
    """Hidden values that all ranks' columns of B multiply.

    Gradients are added up, and values too where each rank has a part.
    """

    def __init__(self, group, of_parts: bool):
        super().__init__()
        self.group, self.of_parts = group, of_parts

    def forward(self, x):
        if self.of_parts:
            x = mappings.reduce_from_tensor_model_parallel_region(x, group=self.group)
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.group)
