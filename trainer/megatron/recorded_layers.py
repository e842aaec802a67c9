"""Layers that are recorded once as CUDA graphs, and started as one (train.cuda_graphs).

Megatron-Core records, behind the third step, what of a layer takes the same shapes at each step: attention, norms and
routers, and all of a dense layer. What experts compute, and attention over packed rows, whose lengths no graph takes,
stay outside.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportMissingImports=false

import functools
from typing import Any

import torch

from conf.schema.run import Run

HEAD_START = 20_000  # cycles, some 10 microseconds


def choose(run: Run, provider) -> None:
    """Have the model recorded."""
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
        _sum_beside_products()


def _moe_layers(provider) -> list[int]:
    """For each layer 1, if it has experts."""
    frequency = provider.moe_layer_freq
    return frequency if isinstance(frequency, list) else [int(i % frequency == 0) for i in range(provider.num_layers)]


def _leave_masks_out() -> None:
    """Record layers without a mask. Causal attention reads none, and one of zeros would be made for each layer."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if hasattr(TransformerLayer, "inputs_with_mask"):
        return
    with_mask = TransformerLayer.inputs_with_mask = TransformerLayer.get_layer_static_inputs
    arguments = TransformerLayer._get_te_cuda_graph_replay_args

    def inputs(self, *sizes):
        found = with_mask(self, *sizes)
        found.pop("attention_mask", None)
        return found

    def without_mask(self, *given, attention_mask=None, **named):
        return arguments(self, *given, **named)

    TransformerLayer.get_layer_static_inputs = inputs
    TransformerLayer._get_te_cuda_graph_replay_args = without_mask


def _hand_out_gradients() -> None:
    """Have a layer hand out its weights' gradients where its graph has made them.

    Transformer Engine copies them, as whoever keeps one would see the next replay write over it. Core adds each to the
    main gradient at once, before another layer's graph is started, and those of the large weights are in the main
    gradient already: what is copied for them says nothing.
    """
    from megatron.core.transformer import cuda_graphs

    record = cuda_graphs.make_graphed_callables
    if not isinstance(record, functools.partial):
        cuda_graphs.make_graphed_callables = functools.partial(record, clone_param_grads_on_return=False)


def _sum_beside_products() -> None:
    """Have the sum of a layer's gradients over tensor-parallel ranks begin before the product that computes beside it.

    In a graph both may begin when the product before them has ended. The next product begins first and takes the whole
    GPU, so that the sum would come behind it; without a graph the host starts the sum first.
    """
    from transformer_engine.pytorch.module import layernorm_linear, linear

    for module in (linear, layernorm_linear):
        if not isinstance(module.allreduce, functools.partial):
            module.allreduce = functools.partial(_with_head_start, module.allreduce)


def _with_head_start(allreduce: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    found = allreduce(tensor, group, async_op=async_op)
    if async_op and torch.cuda.is_current_stream_capturing():
        torch.cuda._sleep(HEAD_START)
    return found
