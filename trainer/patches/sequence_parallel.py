"""Patch of adapters under sequence parallelism (tp > 1, layout.sp): each must process all tokens, forward and backward.

Case 1: an adapter after a fused norm (linear_qkv, a dense linear_fc1, MLA's up projections). Megatron-Bridge lets
Transformer Engine's layer return the norm's output gathered over tp and passes it to the adapter. Transformer Engine's
backward adds the gradient of that output only if the output is not gathered. A gathered output's gradient is dropped,
from 2.4 to at least 2.20.2 (pytorch/module/layernorm_linear.py; up to 2.3 it was added in both cases). The adapter's
contribution to the gradient of its input was therefore silently lost: none while B is zero, more with every step, and
wrong in every layer below. Here the layer returns the rank's own tokens, whose gradient every version adds.
megatron-core's mapping gathers them before the adapter, and its backward sums over ranks. Dropout, the adapter's first
operation, draws as before.

Case 2: an adapter of a layer that is whole on every rank (MLA's down projections). Each rank has its own tokens, but
Bridge cuts the adapter over tp and combines results of different tokens. Here such an adapter gets all tokens and
returns each rank its own. Without sp every rank has all tokens, and Bridge is correct.

Remove case 1 when Bridge no longer requests a gathered output, or when it requires a Transformer Engine whose backward
adds its gradient; remove case 2 when Bridge gathers for such layers. tests/trainer/megatron/test_gradients.py checks
both, and benchmarks/gpu/gradients.py on GPUs.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/peft/utils.py
https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/module/layernorm_linear.py
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.utils import ParallelLinearAdapter
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELinear, TERowParallelLinear
from megatron.core.tensor_parallel import mappings

from trainer.patches import versions


def give_every_adapter_all_tokens(model) -> None:
    """Let each adapter of `model` process all tokens. `model` is a stage, or a list of them, with new adapters."""
    versions.check(__name__)
    for chunk in model if isinstance(model, list) else [model]:
        for module in chunk.modules():
            if not isinstance(module, AdapterWrapper) or not isinstance(module.adapter, ParallelLinearAdapter):
                continue
            layer, adapter = module.to_wrap, module.adapter
            if getattr(layer, "return_layernorm_output_gathered", False):
                layer.return_layernorm_output_gathered = False
                adapter.disable_sequence_parallel_comm = True  # Bridge gathers after the dropout
                adapter.register_forward_pre_hook(_gather)
            elif _is_whole(layer) and layer.config.sequence_parallel:
                adapter.register_forward_pre_hook(_gather)
                adapter.register_forward_hook(_scatter)


def _is_whole(layer) -> bool:
    return isinstance(layer, TELinear) and not isinstance(layer, TEColumnParallelLinear | TERowParallelLinear)


def _gather(adapter, inputs):
    tokens, *rest = inputs
    return (mappings.gather_from_sequence_parallel_region(tokens, group=adapter.tp_group), *rest)


def _scatter(adapter, _inputs, output):
    return mappings.scatter_to_sequence_parallel_region(output, group=adapter.tp_group)
