"""Patch of the adapter that all experts of a layer share: the same model at every layout.

Megatron-Bridge keeps a copy of such an adapter on each expert-parallel rank: it broadcasts the first copy's values and
sums the gradients, so all copies stay equal. On a tiny MoE in fp32 without gradient clipping, losses at ep 1, 2 and 4
then agree to 2e-7. Two bugs remained, both silent:

The norm of all gradients counted every copy: 5 to 20 % too large at ep 2 and 4, and clipping was wrong with it.
count_once() counts one.

Under expert tensor parallelism the adapter had the same bugs as the one per expert (expert_adapters.py), also if
experts are not grouped. fc2's ranks multiplied only their part of the hidden values, and the dispatcher summed copies
of the result; fc1's A got its gradient from one rank's columns of B alone. Losses were off by 1.6 % after ten steps at
etp 2. Adapter fixes both.

Remove each part when Bridge does the same; the rows "shared" of benchmarks/layouts.py check them.
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


def install() -> None:
    """Let Bridge's LoRA use the adapters of this module."""
    versions.check(__name__)
    lora.ParallelLinearAdapter = Adapter


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


class Adapter(ParallelLinearAdapter):
    """Bridge's adapter of one layer, correct also on experts that are cut over several ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ways = self.tp_group.size() if self.is_expert and self.tp_group is not None else 1
        if self.ways > 1:
            # Between A and B, ranks have parts of the gradient, and on fc2 parts of the value.
            self.activation = Hidden(self.tp_group, of_parts=self.input_is_parallel)
            self.linear_out.gather_output = False

    def forward(self, x, *args, **kwargs):
        output = super().forward(x, *args, **kwargs)
        if self.ways == 1 or not self.input_is_parallel:
            return output
        # fc2: the dispatcher sums the ranks' outputs, so a rank sets the columns of the others to 0.
        width, rank = output.shape[-1], self.tp_group.rank()
        return nn.functional.pad(output, (rank * width, (self.ways - 1 - rank) * width))


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
