"""Mappings that Megatron-Bridge lacks: for transposed matrices, and for a vocabulary that Megatron pads."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ConcatenatedQKVMapping


class TransposedQKVMapping(ConcatenatedQKVMapping):
    """Mapping of one matrix of queries, keys and values that is stored transposed."""

    permute_dims = (1, 0)

    def hf_to_megatron(self, hf_weights, megatron_module):
        return super().hf_to_megatron(hf_weights.t().contiguous(), megatron_module)

    def megatron_to_hf(self, megatron_weights, megatron_module):
        weights = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: weight.t().contiguous() for name, weight in weights.items()}


class PaddedVocabularyMapping(AutoMapping):
    """Mapping of an embedding with more rows in Megatron. Bridge's mapping pads only if it is cut over ranks."""

    def hf_to_megatron(self, hf_weights, megatron_module):
        lacking = megatron_module.weight.shape[0] * self.tp_size - hf_weights.shape[0]
        pads = torch.zeros(lacking, *hf_weights.shape[1:], dtype=hf_weights.dtype, device=hf_weights.device)
        return super().hf_to_megatron(torch.cat([hf_weights, pads]), megatron_module)
