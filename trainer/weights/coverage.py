"""Check before a conversion that released tensors and Megatron's parameters match completely.

If a name has no mapping or a tensor is missing, Megatron-Bridge only logs a warning: parameters then keep arbitrary
values, and released tensors (in one version, whole multi-token-prediction layers) are dropped. Here names and shapes
are compared first, from the files' headers alone, and any difference ends the conversion.
"""

import itertools
from dataclasses import dataclass

from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.models.conversion.param_mapping import AutoMapping, ReplicatedMapping
from megatron.bridge.models.conversion.utils import get_module_and_param_from_name, persistent_buffers, unwrap_model

from contract.faults import Fault
from trainer.weights import released
from trainer.weights.atomic_folder import gather
from trainer.weights.mapping import stacks_experts
from trainer.weights.released import enumerate_names

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
Shape = tuple[int, ...]


@dataclass
class Demand:
    """Tensors that the Megatron model needs."""

    shapes: dict[str, Shape]  # of released tensors, by their released names
    unmapped: list[str]  # Megatron's names of parameters without a released tensor


def demand(bridge, model) -> Demand:
    """Return the demand of the whole model; each rank examines its own part."""
    model = unwrap_model(model)
    registry = bridge._model_bridge.mapping_registry()
    shapes: dict[str, Shape] = {}
    unmapped = []
    for stage, name, tensor in _tensors(model):
        config = model[stage].config
        whole_name = _megatron_local_name_to_global(model, config, name, stage)
        if config.share_embeddings_and_output_weights and "output_layer" in whole_name:
            continue  # a copy on the last pipeline stage
        mapping = registry.megatron_to_hf_lookup(whole_name)
        if mapping is None:
            unmapped.append(whole_name)
            continue
        module = get_module_and_param_from_name(model, name, stage)[0]
        whole = _whole_shape(mapping, whole_name, tensor, module)
        if whole_name.endswith(VOCABULARY):
            whole = (bridge.hf_pretrained.config.vocab_size, *whole[1:])  # without padding rows
        shapes |= _released_shapes(mapping, whole, config)
    parts = gather((shapes, unmapped))
    merged = {name: shape for part, _ in parts for name, shape in part.items()}
    return Demand(merged, sorted(set(itertools.chain.from_iterable(names for _, names in parts))))


def check(demand: Demand, model: released.Model, sums: dict[str, str], left_out: set[str]) -> None:
    """Raise a Fault that lists every kind of difference. `left_out` are released tensors that are not converted."""
    tensors, copies = model.weights, released.repeated(model)
    used = demand.shapes.keys() | copies.keys() | left_out
    extra = [name for name in tensors if name not in used and not released.COMPUTED.search(name)]
    missing = [name for name in demand.shapes if name not in tensors]
    both = {name: shape for name, shape in demand.shapes.items() if name in tensors}
    shapes = [
        f"{name} is {list(tensors[name].shape)} and should be {list(shape)}"
        for name, shape in both.items()
        if shape and tensors[name].shape != shape
    ]
    differ = [
        f"{copy} (of {original})"
        for copy, original in copies.items()
        if [sums[part] for part in model.parts(copy)] != [sums[part] for part in model.parts(original)]
    ]
    problems = [
        f"{text} ({len(names)}): {enumerate_names(sorted(names))}"
        for text, names in (
            ("tensors that nothing in the model uses", extra),
            ("tensors missing", missing),
            ("tensors of the wrong shape", shapes),
            ("copies that differ from their original", differ),
            ("Megatron parameters that no tensor fills", demand.unmapped),
        )
        if names
    ]
    if problems:
        raise Fault(f"{model.folder}: {'; '.join(problems)}")


def unfilled(model) -> list[str]:
    """Return the names of tensors that contain a NaN: after fill_with_nan(), those that were not filled completely."""
    model = unwrap_model(model)
    names = [
        _megatron_local_name_to_global(model, model[stage].config, name, stage)
        for stage, name, tensor in _tensors(model)
        if tensor.is_floating_point() and tensor.isnan().any()
    ]
    return sorted(set(itertools.chain.from_iterable(gather(names))))


def fill_with_nan(model) -> None:
    for _, _, tensor in _tensors(unwrap_model(model)):
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))


def named_tensors(model):
    """Yield the tensors in a checkpoint of this rank's part, by their names in the whole model."""
    model = unwrap_model(model)
    for stage, name, tensor in _tensors(model):
        yield _megatron_local_name_to_global(model, model[stage].config, name, stage), tensor


def _tensors(model):
    """Yield the tensors in a checkpoint of this rank's part, as (stage, local name, tensor)."""
    for stage, chunk in enumerate(model):
        for name, tensor in itertools.chain(chunk.named_parameters(), persistent_buffers(chunk)):
            if "_extra_state" not in name:
                yield stage, name, tensor


def _whole_shape(mapping, name: str, tensor, module) -> Shape:
    shape = list(tensor.shape)
    if isinstance(mapping.hf_param, dict):
        shape[0] *= mapping.tp_size  # queries, keys, values; gate, up: always cut over the rows
        return tuple(shape)
    if type(mapping) is ReplicatedMapping:
        return tuple(shape)
    # the mapping reads the module, and the parameter's name if a module has cut and uncut parameters
    kind = AutoMapping(name, name)._detect_parallelism_type(module)
    if kind == "column" or (kind == "row" and len(shape) > 1):
        shape[0 if kind == "column" else 1] *= mapping.tp_size
    return tuple(shape)


def _released_shapes(mapping, whole: Shape, config) -> dict[str, Shape]:
    names = mapping.hf_param
    if stacks_experts(mapping):
        return {names: (config.num_moe_experts, *whole[::-1])}
    if isinstance(names, str):
        permutation, grouped = getattr(mapping, "permute_dims", None), getattr(mapping, "is_grouped_export", False)
        if permutation == (1, 0) and not grouped:
            return {names: whole[::-1]}
        return {names: () if permutation or grouped else whole}  # (): Bridge checks the shape while it loads
    if set(names) == {"gate", "up"}:
        return dict.fromkeys(names.values(), (whole[0] // 2, *whole[1:]))
    if set(names) == {"q", "k", "v"} and not getattr(config, "attention_output_gate", False):
        rows = {"q": config.num_attention_heads, "k": config.num_query_groups, "v": config.num_query_groups}
        return {names[part]: (heads * config.kv_channels, *whole[1:]) for part, heads in rows.items()}
    return dict.fromkeys(names.values(), ())
