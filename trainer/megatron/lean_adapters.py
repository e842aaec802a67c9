"""LoRA at a cost in proportion to its rank: the same function as Megatron-Bridge's layers, with less communication and
memory traffic.

Only tensors of the adapter's rank are sent between GPUs. Both of a layer's collectives commute with B's product, so
they run before it. For tensor-parallel rank i and scale s:

    column (qkv, fc1)     h = gather(x_i A'), y_i += s h B_i'               A is whole on every rank, B is cut
    row (proj, fc2)       h = reduce_scatter(x_i A_i'), y_i += s h B'       A is cut, B is whole on every rank
    a layer that is whole     y_i += s (x_i A') B'                          both are whole

Bridge gathers x itself for the first, and gathers B's columns after the second. That is 67 MB instead of 0.3 MB for h,
for 4096 tokens of Llama-70B at rank 32. Bridge also computes the product, scales it and adds it to y in three passes
over data of the size of y. Here B's product is added to y in place, in one pass.

With sequence parallelism (layout.sp), a whole matrix has only a part of its gradient on each rank: that of the rank's
own tokens. The parameter is marked, and megatron-core sums its gradient once per step. Without sp all ranks have all
tokens, and the same gradient.

Adapters of experts that are cut (etp > 1) and DoRA keep Bridge's implementation.

Checkpoints are the same: names, and shapes of whole tensors. So are the weights that Bridge merges or exports from a
model in training, after tell_bridge() has marked the matrices that are whole on every rank. Losses equal those of
Bridge's layers except for rounding; with dropout the random draws differ. adapter.lean: false selects Bridge's layers.

LeanExperts adds the adapters of each expert of a layer as one grouped product over all experts, in place.

Megatron-Bridge's adapters concatenate their input, copy the experts' token counts to the GPU for each of a layer's
products, and select the weights of experts that have tokens. The host therefore waits for the GPU three times per
layer, and two passes over the output scale and add. None of that is needed if every expert has tokens, or if the token
counts stay on the GPU (frozen_experts.py). Bridge's product is used if an expert has no tokens and the counts are on
the host, or if the grouped product is impossible (not bf16 on a GPU, FP8, experts that are cut, sizes that are not
multiples of 8).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportOptionalSubscript=false, reportCallIssue=false

import functools
from dataclasses import replace
from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import ReplicatedMapping, RowParallelMapping
from megatron.bridge.models.conversion.peft_bridge import AdapterWeightConversionTask, MegatronPeftBridge
from megatron.bridge.peft import lora
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from trainer.megatron.frozen_experts import Counts, Product
from trainer.patches.expert_adapters import ExpertAdapter, SharedAdapter


def install() -> None:
    """Let Bridge's LoRA build the adapters of this module; with_lean_adapter() wraps the layers."""
    lora.ParallelLinearAdapter = LeanAdapter
    tell_bridge()


def tell_bridge() -> None:
    """Make Bridge not gather matrices that are whole on every rank when it merges or exports adapters."""
    build = MegatronPeftBridge.build_adapter_conversion_tasks
    if getattr(build, "knows_lean", False):
        return

    @functools.wraps(build)
    def build_tasks(*args, **kwargs):
        tasks_of = build(*args, **kwargs)
        return {base: [_as_lean(task) for task in tasks] for base, tasks in tasks_of.items()}

    build_tasks.knows_lean = True
    MegatronPeftBridge.build_adapter_conversion_tasks = build_tasks


def _as_lean(task: AdapterWeightConversionTask) -> AdapterWeightConversionTask:
    """Mark the uncut matrix of a cut layer as replicated: A of a column layer, B of a row layer.

    Pipeline stages without the layer need this as well. Adapters of experts are not changed: none of their matrices is
    whole where Bridge expects a cut one.
    """
    if ".experts." in task.global_base_prefix or type(task.linear_in_task.mapping) is ReplicatedMapping:
        return task
    name = "linear_out_task" if type(task.linear_in_task.mapping) is RowParallelMapping else "linear_in_task"
    matrix_task = getattr(task, name)
    mapping = ReplicatedMapping(matrix_task.mapping.megatron_param, matrix_task.mapping.hf_param)
    return replace(task, **{name: replace(matrix_task, mapping=mapping)})


def with_lean_adapter(module: nn.Module) -> nn.Module:
    """Return the module, wrapped if its adapter can add to the layer's output in place."""
    if type(module) is LoRALinear and isinstance(module.adapter, ExpertAdapter):
        return LeanExperts(module.to_wrap, module.adapter)
    if type(module) is not LoRALinear or not getattr(module.adapter, "lean", False):
        return module
    module.to_wrap.return_layernorm_output_gathered = False  # the adapter takes the rank's own tokens
    return LeanLinear(module.to_wrap, module.adapter)


class LeanLinear(LoRALinear):
    """Layer with an adapter that adds to the layer's output in place."""

    def forward(self, x, *args, **kwargs):
        output, bias, adapter_input = self.base_linear_forward(x, *args, **kwargs)
        return (self.adapter(adapter_input, output) if self._adapter_enabled else output), bias


class LeanAdapter(SharedAdapter):
    """Adapter of one layer. If experts are cut, it is Bridge's, with the fixes of patches/expert_adapters.py."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lean = self.ways == 1
        self.sequence_cut = self.config.sequence_parallel and not self.is_expert
        if self.lean:
            for name, cut in (("linear_in", self.input_is_parallel), ("linear_out", not self.input_is_parallel)):
                is_whole = not (cut and self.base_linear_is_parallel)
                setattr(self, name, Matrix(getattr(self, name), self.tp_group, is_whole, self.sequence_cut))
        for parameter in self.parameters():
            parameter.is_copied = self._uses_grouped_expert_sharding()

    def _register_shared_expert_grad_sync_hooks(self) -> None:
        """Do nothing: the sum over expert-parallel ranks runs once at the end of the step."""

    def forward(self, x, output=None):
        """Add the adapter's part to `output` in place; without `output`, return it as Bridge's forward does."""
        if not self.lean:
            return super().forward(x)
        hidden = self._across(nn.functional.linear(self._dropped(x), self.linear_in()))
        return _AddProduct.apply(output, hidden, self.linear_out(), self.alpha / self.dim)

    def _dropped(self, x):
        """Apply dropout; ranks with different tokens or columns draw different numbers."""
        if isinstance(self.dropout, nn.Identity):
            return x
        if not (self.input_is_parallel or self.sequence_cut) or self.is_expert:
            return self.dropout(x)
        with get_cuda_rng_tracker().fork():
            return self.dropout(x)

    def _across(self, hidden):
        """Exchange A's output between ranks; return the values that this rank's part of B multiplies."""
        if self.is_expert or not self.base_linear_is_parallel or self.tp_group.size() == 1:
            return hidden
        if self.input_is_parallel and self.sequence_cut:
            return mappings.reduce_scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        if self.input_is_parallel:
            return mappings.reduce_from_tensor_model_parallel_region(hidden, group=self.tp_group)
        if self.sequence_cut:
            return mappings.gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)


class Matrix(nn.Module):
    """A or B of an adapter, cut over tensor-parallel ranks or whole on each, and saved like Megatron's layers.

    Callers call the module to get the weight, because hooks that gather parameters belong to modules.
    """

    def __init__(self, layer: nn.Module, group, is_whole: bool, sequence_cut: bool):
        super().__init__()
        self.tp_group, self.weight = group, layer.weight
        self.dim = None if is_whole else layer.weight.partition_dim
        self.sections: dict[str, int] = {}  # rows by section of a layer that is cut section by section
        if is_whole and group is not None and group.size() > 1:
            self.weight = _whole(layer.weight, group.size())
            self.weight.sequence_parallel = sequence_cut  # megatron-core sums such a gradient over tp

    def forward(self):
        return self.weight

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        cut = {} if self.dim is None else {"weight": self.dim}
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        sharded = make_sharded_tensors_for_checkpoint(state, prefix, cut, sharded_offsets, **groups)
        if self.sections:
            weight, names = sharded[f"{prefix}weight"], [*self.sections]
            sharded[f"{prefix}weight"] = _split_tensor_factory(weight, [*self.sections.values()], names, 0)
        return sharded

    def get_extra_state(self) -> None:
        """Return None: checkpoints have this empty entry for Megatron's layers."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore that entry."""


def _whole(cut: nn.Parameter, ways: int) -> nn.Parameter:
    """Make the whole matrix that consists of `ways` parts like `cut`, with the same values on every rank.

    Training overwrites these values (trainer/megatron/adapters.py); a trial keeps them.
    """
    shape = list(cut.shape)
    shape[cut.partition_dim] *= ways
    whole = nn.Parameter(torch.zeros(shape, dtype=cut.dtype, device=cut.device))
    if not cut.is_meta and cut.any():
        nn.init.xavier_normal_(whole, generator=torch.Generator(cut.device).manual_seed(0))
    set_tensor_model_parallel_attributes(whole, False, cut.partition_dim, cut.partition_stride)
    whole.allreduce = cut.allreduce
    return whole


class _AddProduct(torch.autograd.Function):
    """Compute `output` + `scale` * hidden B' in place of `output`.

    This is safe because the function that computed `output` does not keep it: neither Transformer Engine's layers nor
    megatron-core's mappings do. `output` is not marked as changed, because autograd refuses that for a view that
    another function returned.
    """

    @staticmethod
    def forward(ctx, output, hidden, weight, scale):
        ctx.save_for_backward(hidden, weight)
        ctx.scale = scale
        output = output.contiguous()
        output.view(-1, output.shape[-1]).addmm_(_flat(hidden), weight.t(), alpha=scale)
        return output

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        flat = _flat(gradient)
        of_hidden = _product(flat, weight, ctx.scale).view(hidden.shape)
        return gradient, of_hidden, _product(flat.t(), _flat(hidden), ctx.scale), None


def _flat(x):
    return x.reshape(-1, x.shape[-1])


def _product(left, right, scale: float):
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)


class LeanExperts(LoRALinear):
    """Grouped layer with an adapter for each expert."""

    def forward(self, x, *args, **kwargs):
        output, bias, adapter_input = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        if isinstance(args[0], Counts) and fits(self.adapter, adapter_input):
            return _Add.apply(output, grouped(self.adapter, adapter_input, args[0])), bias
        args = (args[0].on_host, *args[1:]) if isinstance(args[0], Counts) else args
        sizes = self.adapter._extract_expert_splits(args, kwargs)
        if not is_grouped(self.adapter, adapter_input, sizes):
            return output + self.adapter(adapter_input.contiguous(), *args, **kwargs).reshape(output.shape), bias
        return _Add.apply(output, grouped(self.adapter, adapter_input, Counts(sizes))), bias


def is_grouped(adapter: ExpertAdapter, x, sizes: list[int]) -> bool:
    return all(sizes) and fits(adapter, x)


def fits(adapter: ExpertAdapter, x) -> bool:
    whole = adapter.expert_tp_group is None or adapter.expert_tp_group.size() == 1
    return whole and not adapter._is_te_fp8_enabled() and adapter._can_use_grouped_mm(x)


def grouped(adapter: ExpertAdapter, x, counts: Counts):
    """Return the adapters' part of the layer's output."""
    ends = counts.ends(x.device)
    hidden = Product.apply(adapter.dropout(x), adapter.linear_in(), ends)
    return Product.apply(hidden * (adapter.alpha / adapter.dim), adapter.linear_out(), ends)


class _Add(torch.autograd.Function):
    """Compute `output` + `part` in place of `output`, like _AddProduct."""

    @staticmethod
    def forward(ctx, output, part):
        return output.contiguous().add_(part.view(output.shape))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient
