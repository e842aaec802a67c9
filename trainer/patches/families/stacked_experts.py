"""Patch for gpt-oss: one expert of a released tensor of all experts is turned as the release says, whatever its shape.

Megatron-Bridge tells the sides of gate_up_proj by its shape, and where hidden_size is twice intermediate_size it takes
the matrix as it is: every weight finds its place, and the logits are off by more than the largest of them. For each
expert it turns the down_proj of all of them
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/gpt_oss/gpt_oss_bridge.py). Under
tensor parallelism each rank holds the sinks of its heads, and nothing says so: the norm of the gradients is taken of
one rank's. With the sinks, megatron-core saves a state of attention on a GPU that it saves of no other family's. The
patch can go when Bridge asks no shape, turns one expert at a time and marks the sinks as cut.

A release in MXFP4 is unpacked the way round that one in bf16 has (trainer/weights/quantised/unpack.py).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import torch
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.utils.common_utils import extract_expert_number_from_param

from trainer.patches import versions

WRITTEN_FOR = {"megatron-bridge": ("0.6.2",), "megatron-core": ("0.19.2",)}
SINKS = ".softmax_offset"


def install() -> None:
    """Have gpt-oss's bridge take experts out of their tensors by these rules."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.bridge.models.gpt_oss import gpt_oss_bridge

    if hasattr(gpt_oss_bridge.GPTOSSMLPDownProjMapping, "by_turns"):
        return
    gpt_oss_bridge.GPTOSSMLPGateUpProjMapping.by_turns = True  # rows of gate and up; trainer/weights/mapping.py asks
    gpt_oss_bridge.GPTOSSMLPDownProjMapping.by_turns = False
    for mapping in (gpt_oss_bridge.GPTOSSMLPGateUpProjMapping, gpt_oss_bridge.GPTOSSMLPDownProjMapping):
        mapping.hf_to_megatron = _of_one_expert
    bridge = gpt_oss_bridge.GPTOSSBridge
    bridge.maybe_modify_loaded_hf_weight = MegatronModelBridge.maybe_modify_loaded_hf_weight
    provide = bridge.provider_bridge

    def with_sinks_marked(self, hf_pretrained):
        provider = provide(self, hf_pretrained)
        provider.register_pre_wrap_hook(_mark_sinks)
        return provider

    bridge.provider_bridge = with_sinks_marked
    _save_sinks_alone()


def _save_sinks_alone() -> None:
    """Leave the state of FP8, which a base has of no family's attention, out of what is saved and loaded with sinks."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    save = TEDotProductAttention.sharded_state_dict

    def without_state(self, *args, **kwargs) -> dict:
        return {name: value for name, value in save(self, *args, **kwargs).items() if "_extra_state" not in name}

    TEDotProductAttention.sharded_state_dict = without_state


def _of_one_expert(mapping, weights: torch.Tensor, module) -> torch.Tensor:
    """Take the mapping's expert from the stack of all, or from a stack of that one alone."""
    number = extract_expert_number_from_param(mapping.megatron_param)
    one = weights[number if len(weights) > 1 else 0]
    one = one.t() if one.ndim == 2 else one
    one = torch.cat((one[::2], one[1::2])) if mapping.by_turns else one
    return AutoMapping.hf_to_megatron(mapping, one.contiguous(), module)


def _mark_sinks(model: list) -> list:
    for stage in model:
        for name, weight in stage.named_parameters():
            if name.endswith(SINKS):
                weight.tensor_model_parallel = True
    return model
