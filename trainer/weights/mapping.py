"""Mapping of Megatron's names and fused layers to the released model's, by Megatron-Bridge's own tables.

Megatron computes queries, keys and values in one layer, and gate and up in one; the released models have them apart.
The rows of a bias, of the B of a low-rank adapter and of DoRA's magnitudes are mapped like those of the weight. Only
mappings that cut a tensor into rows are known here; a model whose mapping does anything else is refused.
"""

from dataclasses import dataclass

import torch
from megatron.bridge.models.conversion import param_mapping
from megatron.bridge.models.conversion.param_mapping import split_qkv_biases, split_qkv_weights

from contract.faults import Fault

PLAIN = (
    param_mapping.AutoMapping,
    param_mapping.ColumnParallelMapping,
    param_mapping.ReplicatedMapping,
    param_mapping.RowParallelMapping,
)
SPLIT = (param_mapping.GatedMLPMapping, param_mapping.QKVMapping)


@dataclass(frozen=True)
class Part:
    """A released tensor as a part of a Megatron tensor: all of it, or one of q, k, v, gate, up."""

    name: str
    role: str | None

    def rows(self, whole: torch.Tensor, config) -> torch.Tensor:
        if self.role is None:
            return whole
        if self.role in ("gate", "up"):
            return whole.chunk(2)[("gate", "up").index(self.role)]
        if whole.ndim == 1:
            parts = split_qkv_biases(config, whole)
        else:
            parts = split_qkv_weights(config, whole, feature_dim=whole.shape[-1])
        return parts["qkv".index(self.role)]


def parts(registry, name: str) -> list[Part] | None:
    """The released tensors that a Megatron weight consists of; None where Bridge has no mapping for it."""
    # A checkpoint calls a multi-token-prediction layer's block transformer_layer; some of Bridge's tables do not.
    names = (name, name.replace(".transformer_layer.", ".mtp_model_layer."))
    mapping = next(filter(None, map(registry.megatron_to_hf_lookup, names)), None)
    if mapping is None:
        return None
    if type(mapping) in PLAIN and getattr(mapping, "permute_dims", None) is None:
        return [Part(mapping.hf_param, None)]
    if type(mapping) in SPLIT:
        return [Part(released, role) for role, released in mapping.hf_param.items()]
    raise Fault(f"{name}: {type(mapping).__name__} is a mapping that export does not know")
