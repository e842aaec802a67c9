"""What is asked of Transformer Engine when layers are recorded as CUDA graphs."""

import sys
import types

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
