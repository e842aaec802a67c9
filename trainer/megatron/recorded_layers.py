"""Layers recorded once as CUDA graphs and replayed at each step (train.cuda_graphs).

Megatron-Core records after the third step the parts of a layer whose shapes are the same at each step: attention, norms
and routers, and all of a dense layer. Experts stay outside, and attention over packed rows too, because their lengths
vary.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false

import functools
from typing import Any

import torch

from conf.schema.run import Run

HEAD_START = 20_000  # cycles, some 10 microseconds


def choose(run: Run, provider) -> None:
    """Select the modules to record, and apply the fixes."""
    provider.cuda_graph_impl = "transformer_engine"
    provider.cuda_graph_modules = [] if run.data.packed else ["attn"]
    if provider.num_moe_experts:
        provider.cuda_graph_modules.append("moe_router")
    if not provider.num_moe_experts or 0 in _moe_layers(provider):
        provider.cuda_graph_modules.append("mlp")
    provider.use_te_rng_tracker = True
    _leave_masks_out()
    _hand_out_gradients()
    if run.layout.tp > 1 and not run.layout.sp:
        _sum_in_parallel()


def _moe_layers(provider) -> list[int]:
    """Return for each layer 1 if it has experts, else 0."""
    frequency = provider.moe_layer_freq
    return frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(provider.num_layers)]


def _leave_masks_out() -> None:
    """Record layers without a mask. Causal attention reads none, and each layer would allocate one of zeros."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if hasattr(TransformerLayer, "inputs_with_mask"):
        return
    with_mask = TransformerLayer.inputs_with_mask = TransformerLayer.get_layer_static_inputs
    arguments = TransformerLayer._get_te_cuda_graph_replay_args

    def inputs(self, *sizes):
        static_inputs = with_mask(self, *sizes)
        static_inputs.pop("attention_mask", None)
        return static_inputs

    def without_mask(self, *args, attention_mask=None, **kwargs):
        return arguments(self, *args, **kwargs)

    TransformerLayer.get_layer_static_inputs = inputs
    TransformerLayer._get_te_cuda_graph_replay_args = without_mask


def _hand_out_gradients() -> None:
    """Make a layer return its weights' gradients without a copy.

    Transformer Engine copies them, because the next replay overwrites them. Core adds each to the main gradient at
    once, before another layer's graph is started, so no copy is needed. Gradients of the large weights are already in
    the main gradient; their copies have no meaning.
    """
    from megatron.core.transformer import cuda_graphs

    record = cuda_graphs.make_graphed_callables
    if not isinstance(record, functools.partial):
        cuda_graphs.make_graphed_callables = functools.partial(record, clone_param_grads_on_return=False)


def _sum_in_parallel() -> None:
    """Start the sum of a layer's gradients over tensor-parallel ranks before the product that runs in parallel.

    In a graph both may start when the preceding product ends. The next product would start first and take the whole
    GPU, and the sum would run after it. Without a graph the host starts the sum first.
    """
    from transformer_engine.pytorch.module import layernorm_linear, linear

    for module in (linear, layernorm_linear):
        if not isinstance(module.allreduce, functools.partial):
            module.allreduce = functools.partial(_with_head_start, module.allreduce)


def _with_head_start(allreduce: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    work = allreduce(tensor, group, async_op=async_op)
    if async_op and torch.cuda.is_current_stream_capturing():
        torch.cuda._sleep(HEAD_START)
    return work
