"""Mappings that Megatron-Bridge lacks.

They are for transposed matrices, for a vocabulary that Megatron pads, and for layers with other heads than the rest.
"""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

import torch
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ConcatenatedQKVMapping, MegatronParamMapping


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


class GroupsMapping(MegatronParamMapping):
    """Mapping of queries, keys and values of a layer with its own number of groups. Some lack v, or k and v."""

    def __init__(self, megatron_param: str, groups: int, queries: int, **names: str):
        super().__init__(megatron_param, names)
        self.names = names  # by role
        self.groups = (groups, queries, *[1] * (len(names) - 1))
        self.whole = AutoMapping(megatron_param, megatron_param)

    def hf_to_megatron(self, hf_weights, megatron_module):
        parts = [weight.unflatten(0, (self.groups[0], -1)) for weight in hf_weights.values()]
        return self.whole.hf_to_megatron(torch.cat(parts, 1).flatten(0, 1), megatron_module)

    def megatron_to_hf(self, megatron_weights, megatron_module):
        gathered = self.whole.megatron_to_hf(megatron_weights, megatron_module).values()
        return {
            name: of_group(whole, self.groups, number)
            for whole in gathered
            for number, name in enumerate(self.names.values())
        }


def of_group(whole: torch.Tensor, groups: tuple[int, ...], number: int) -> torch.Tensor:
    """Return the rows of queries (0), keys (1) or values (2). `groups` are the number of groups, and heads in each."""
    count, *heads = groups
    width = len(whole) // count // sum(heads)
    return whole.unflatten(0, (count, -1)).split([width * each for each in heads], 1)[number].flatten(0, 1)
