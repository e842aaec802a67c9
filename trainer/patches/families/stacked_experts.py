"""Patch for gpt-oss: an expert's matrix from a released tensor of all experts is always transposed, whatever its shape.

Megatron-Bridge detects the orientation of gate_up_proj by its shape. If hidden_size is twice intermediate_size it does
not transpose: every weight fits, and the logits are off by more than the largest of them. For each expert it transposes
the down_proj of all experts
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/models/gpt_oss/gpt_oss_bridge.py). Under
tensor parallelism each rank holds the sinks of its heads without marking them as cut, so the norm of the gradients
includes only one rank's. With the sinks, megatron-core saves a state of attention on a GPU that it saves for no other
family. Remove when Bridge ignores the shape, transposes one expert at a time and marks the sinks as cut.

A release in MXFP4 is unpacked to the orientation of a bf16 release (trainer/weights/quantised/unpack.py).
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import torch
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.conversion.param_mapping import AutoMapping

from trainer.patches import versions

SINKS = ".softmax_offset"


def install() -> None:
    """Make gpt-oss's bridge extract experts from their tensors by these rules."""
    versions.check(__name__)
    from megatron.bridge.models.gpt_oss import gpt_oss_bridge

    if hasattr(gpt_oss_bridge.GPTOSSMLPDownProjMapping, "by_turns"):
        return
    # Rows of gate and up alternate; trainer/weights/mapping.py reads this.
    gpt_oss_bridge.GPTOSSMLPGateUpProjMapping.by_turns = True
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
    """Exclude the FP8 state of attention from saving and loading: a base has none for any family."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    save = TEDotProductAttention.sharded_state_dict

    def without_state(self, *args, **kwargs) -> dict:
        return {name: value for name, value in save(self, *args, **kwargs).items() if "_extra_state" not in name}

    TEDotProductAttention.sharded_state_dict = without_state


def _of_one_expert(mapping, weight: torch.Tensor, module) -> torch.Tensor:
    """Turn the matrix of the mapping's expert, which trainer/weights/conversion took from the stack."""
    weight = weight.t() if weight.ndim == 2 else weight
    weight = torch.cat((weight[::2], weight[1::2])) if mapping.by_turns else weight
    return AutoMapping.hf_to_megatron(mapping, weight.contiguous(), module)


def _mark_sinks(model: list) -> list:
    for stage in model:
        for name, weight in stage.named_parameters():
            if name.endswith(SINKS):
                weight.tensor_model_parallel = True
    return model
