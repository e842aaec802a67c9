"""Mapping of Megatron's names and fused layers to the released model's, by Megatron-Bridge's own tables.

Megatron computes queries, keys and values in one layer, and gate and up in one; the released models have them apart.
GPT-2 has them in one layer too, but not in Megatron's order, and stores its matrices transposed. The rows of a bias,
of the B of a low-rank adapter and of DoRA's magnitudes are mapped like those of the weight. Only mappings that cut a
tensor into rows, or put them in order, are known here; a model whose mapping does anything else is refused.
"""

from dataclasses import dataclass

import torch
from megatron.bridge.models.conversion import param_mapping
from megatron.bridge.models.conversion.param_mapping import split_qkv_biases, split_qkv_weights

from contract.faults import Fault
from trainer.megatron.bridges.mappings import PaddedVocabularyMapping

PLAIN = (
    param_mapping.AutoMapping,
    param_mapping.ColumnParallelMapping,
    param_mapping.ReplicatedMapping,
    param_mapping.RowParallelMapping,
    PaddedVocabularyMapping,
)
SPLIT = (param_mapping.GatedMLPMapping, param_mapping.QKVMapping)
TURNED = (1, 0)


@dataclass(frozen=True)
class Part:
    """A released tensor as a part of a Megatron tensor: all of it, all of qkv, or one of q, k, v, gate, up."""

    name: str
    role: str | None
    turned: bool = False  # the release has the matrix transposed

    def rows(self, whole: torch.Tensor, config) -> torch.Tensor:
        if self.role is None:
            return whole
        if self.role in ("gate", "up"):
            return whole.chunk(2)[("gate", "up").index(self.role)]
        if whole.ndim == 1:
            parts = split_qkv_biases(config, whole)
        else:
            parts = split_qkv_weights(config, whole, feature_dim=whole.shape[-1])
        return torch.cat(tuple(parts)) if self.role == "qkv" else parts["qkv".index(self.role)]

    def turn(self, matrix: torch.Tensor) -> torch.Tensor:
        """Turn a released matrix to Megatron's way round, or Megatron's to the release's."""
        return matrix.t() if self.turned else matrix

    def shape(self, released: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the released tensor the way round that Megatron has it."""
        return released[::-1] if self.turned else released


def parts(registry, name: str) -> list[Part] | None:
    """The released tensors that a Megatron weight consists of; None where Bridge has no mapping for it."""
    # A checkpoint calls a multi-token-prediction layer's block transformer_layer; some of Bridge's tables do not.
    names = (name, name.replace(".transformer_layer.", ".mtp_model_layer."))
    mapping = next(filter(None, map(registry.megatron_to_hf_lookup, names)), None)
    if mapping is None:
        return None
    turned = getattr(mapping, "permute_dims", None)
    if type(mapping) in PLAIN and turned in (None, TURNED):
        return [Part(mapping.hf_param, None, turned == TURNED)]
    if isinstance(mapping, param_mapping.ConcatenatedQKVMapping) and turned in (None, TURNED):
        return [Part(str(mapping.hf_param), "qkv", turned == TURNED)]
    if type(mapping) in SPLIT and isinstance(mapping.hf_param, dict):
        return [Part(released, role) for role, released in mapping.hf_param.items()]
    raise Fault(f"{name}: {type(mapping).__name__} is a mapping that export does not know")
