"""Mapping of Megatron's names and fused layers to the released model's, from Megatron-Bridge's own tables.

Megatron computes queries, keys and values in one layer, and gate and up in one; released models usually have separate
layers. GPT-2 also has one layer for queries, keys and values, but with rows in another order, and stores its matrices
transposed. Qwen3.5 has all experts of a layer in one tensor; gpt-oss too, transposed, with alternating rows of gate and
up. The six projections of a gated delta net are one layer in Megatron, and two or four in releases. The rows of a bias,
of an adapter's B and of DoRA's magnitudes are mapped like the rows of the weight. Only mappings that cut a tensor into
rows or reorder rows are supported; models with any other mapping are refused.
"""

import re
from dataclasses import dataclass

import torch
from megatron.bridge.models.conversion import param_mapping
from megatron.bridge.models.conversion.param_mapping import split_qkv_biases, split_qkv_weights

from contract.faults import Fault
from trainer.megatron.bridges.mappings import GroupsMapping, PaddedVocabularyMapping, of_group
from trainer.weights import released_tensors
from trainer.weights.released import Model

PLAIN = (
    param_mapping.AutoMapping,
    param_mapping.ColumnParallelMapping,
    param_mapping.ReplicatedMapping,
    param_mapping.RowParallelMapping,
    param_mapping.GDNConv1dMapping,  # without tensor parallelism, like the two of Mamba
    param_mapping.MambaConv1dMapping,
    param_mapping.MambaInProjMapping,
    PaddedVocabularyMapping,
)
SPLIT = (
    param_mapping.GatedMLPMapping,
    param_mapping.QKVMapping,
    param_mapping.GDNLinearMapping,
    param_mapping.GDNLinearMappingSeparate,
)
STACKS = (param_mapping.FusedExpertMapping, param_mapping.FusedGatedExpertMapping)
TRANSPOSED = (1, 0)
DELTA_NET = "delta net: "
BY_TURNS = "gate and up by turns"
EXPERT = re.compile(r"\d+$")


@dataclass(frozen=True)
class Part:
    """A released tensor as a part of a Megatron tensor: all of it, or the rows of a role in a fused layer.

    Roles are qkv, one of q, k, v, gate and up, and projections of a gated delta net: qkvz, ba, or qkv, z, b, a.

    If the released tensor stacks the experts of a layer, the part is one expert.
    """

    name: str
    role: str | None
    turned: bool = False  # the release stores the matrix transposed
    expert: int | None = None  # number in a stack
    groups: tuple[int, ...] = ()  # number of groups and heads in each, if they differ from those of other layers

    def rows(self, whole: torch.Tensor, config) -> torch.Tensor:
        if self.role is None:
            return whole
        if self.role == BY_TURNS:
            return whole.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        if self.role in ("gate", "up"):
            return whole.chunk(2)[("gate", "up").index(self.role)]
        if self.role.startswith(DELTA_NET):
            return whole[_delta_rows(self.role.removeprefix(DELTA_NET), len(whole), config)]
        if self.groups:
            return of_group(whole, self.groups, "qkv".index(self.role))
        if whole.ndim == 1:
            parts = split_qkv_biases(config, whole)
        else:
            parts = split_qkv_weights(config, whole, feature_dim=whole.shape[-1])
        return torch.cat(tuple(parts)) if self.role == "qkv" else parts["qkv".index(self.role)]

    def turn(self, matrix: torch.Tensor) -> torch.Tensor:
        """Transpose between the release's and Megatron's orientation, if they differ."""
        return matrix.t() if self.turned else matrix

    def shape(self, released: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the released tensor, or of one expert of a stack, in Megatron's orientation."""
        own = released if self.expert is None else released[1:]
        return own[::-1] if self.turned else own

    def of(self, released: torch.Tensor) -> torch.Tensor:
        """Return the released tensor, or its expert."""
        return released if self.expert is None else released[self.expert]


def _delta_rows(role: str, rows: int, config) -> torch.Tensor:
    """Return the numbers of Megatron's rows, in the order of a released tensor of a gated delta net."""
    grouped = param_mapping.split_gdn_linear_weights(config, torch.arange(rows)[:, None], feature_dim=1)
    separate = param_mapping._split_gdn_grouped_to_separate(config, *grouped, feature_dim=1)
    return (*grouped, *separate)[("qkvz", "ba", "qkv", "z", "b", "a").index(role)].flatten()


def read(model: Model, part: Part) -> torch.Tensor:
    """Return the released weight, or one expert of a stack."""
    if part.expert is None:
        return released_tensors.read(model, part.name)
    return released_tensors.read(model, part.name, slice(part.expert, part.expert + 1))[0]


def released_names(mapping) -> list[str]:
    """Return the released weights from which Bridge's mapping makes a parameter."""
    return [mapping.hf_param] if isinstance(mapping.hf_param, str) else [*mapping.hf_param.values()]


def stacks_experts(mapping) -> bool:
    """Whether the released tensor has all experts of a layer."""
    return isinstance(mapping, STACKS) or turns(mapping)


def turns(mapping) -> bool:
    """Whether the stack has transposed matrices, as in gpt-oss (trainer/patches/families/stacked_experts.py)."""
    return hasattr(mapping, "by_turns")


def parts(registry, name: str) -> list[Part] | None:
    """Return the released tensors that make up a Megatron weight; None if Bridge has no mapping for it."""
    # A checkpoint calls a multi-token-prediction layer's block transformer_layer; some of Bridge's tables do not.
    names = (name, name.replace(".transformer_layer.", ".mtp_model_layer."))
    mapping = next(filter(None, map(registry.megatron_to_hf_lookup, names)), None)
    if mapping is None:
        return None
    if stacks_experts(mapping):
        number = EXPERT.search(name)
        assert number, f"{name} is not an expert's"
        role = BY_TURNS if getattr(mapping, "by_turns", False) else None
        return [Part(str(mapping.hf_param), role, turns(mapping), int(number[0]))]
    permutation = getattr(mapping, "permute_dims", None)
    if type(mapping) in PLAIN and permutation in (None, TRANSPOSED):
        return [Part(mapping.hf_param, None, permutation == TRANSPOSED)]
    if isinstance(mapping, param_mapping.ConcatenatedQKVMapping) and permutation in (None, TRANSPOSED):
        return [Part(str(mapping.hf_param), "qkv", permutation == TRANSPOSED)]
    if type(mapping) in SPLIT and isinstance(mapping.hf_param, dict):
        prefix = DELTA_NET if type(mapping) in SPLIT[2:] else ""
        return [Part(released, prefix + role) for role, released in mapping.hf_param.items()]
    if isinstance(mapping, GroupsMapping):
        return [Part(released, role, groups=mapping.groups) for role, released in mapping.names.items()]
    raise Fault(f"{name}: export does not support the mapping {type(mapping).__name__}")
