"""What is asked of Transformer Engine when layers are recorded as CUDA graphs."""

import sys
import types

import torch

from trainer.megatron import recorded_layers


def test_layers_are_recorded_without_copies_of_what_is_added_at_once(monkeypatch):
    asked = []
    names = ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.cuda_graphs")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[names[-2]].cuda_graphs = core = sys.modules[names[-1]]
    core.make_graphed_callables = lambda *layers, **settings: asked.append((layers, settings))
    recorded_layers._hand_out_gradients()
    recorded_layers._hand_out_gradients()
    core.make_graphed_callables("layer", _order=[1, -1])
    assert asked == [(("layer",), {"_order": [1, -1], "clone_param_grads_on_return": False})]


def test_a_recorded_sum_begins_before_the_product_beside_it(monkeypatch):
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    done: list[object] = []
    modules = [types.SimpleNamespace(allreduce=lambda *given, **how: done.append((given, how)) or "work")] * 2
    sys.modules[names[-1]].linear, sys.modules[names[-1]].layernorm_linear = modules
    recorded_layers._sum_in_parallel()
    recorded_layers._sum_in_parallel()
    monkeypatch.setattr(torch.cuda, "_sleep", done.append)
    for recorded, async_op in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda recorded=recorded: recorded)
        assert modules[0].allreduce("sum", "group", async_op=async_op) == "work"
    how = [(("sum", "group"), {"async_op": async_op}) for async_op in (False, True, True)]
    assert done == [*how, recorded_layers.HEAD_START]
