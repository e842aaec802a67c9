"""Check before a conversion that released tensors and Megatron's parameters match completely.

If a name has no mapping or a tensor is missing, Megatron-Bridge only logs a warning: parameters then keep arbitrary
values, and released tensors (in one version, whole multi-token-prediction layers) are dropped. Here names and shapes
are compared first, from the files' headers and conf/families/, and any difference ends the conversion.
"""

import itertools

from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.bridge.models.conversion.utils import persistent_buffers, unwrap_model

from conf import model_facts
from trainer.weights import released
from trainer.weights.atomic_folder import gather
from trainer.weights.mapping import released_names

VOCABULARY = ("embedding.word_embeddings.weight", "embedding.per_layer.table.weight", "output_layer.weight")


def check(bridge, chunks: list, model: released.Model, sums: dict[str, str], left_out: set[str]) -> None:
    """Raise a Fault that lists every kind of difference between the release and the whole model.

    Each rank reads its own part of the model. `left_out` are released tensors that are not converted.
    """
    needed, unmapped = _demand(bridge, chunks)
    tensors, copies = model.weights, released.repeated(model)
    used = needed | copies.keys() | left_out
    extra = [name for name in tensors if name not in used and not released.COMPUTED.search(name)]
    missing = [name for name in needed if name not in tensors]
    expected = model_facts.shapes(model.config, model.weights)
    shapes = [
        f"{name} is {list(tensors[name].shape)} and should be {list(expected[name])}"
        for name in needed & tensors.keys() & expected.keys()
        if tensors[name].shape != expected[name]
    ]
    differ = [
        f"{copy} (of {original})"
        for copy, original in copies.items()
        if [sums[part] for part in model.parts(copy)] != [sums[part] for part in model.parts(original)]
    ]
    problems = {
        released.EXTRA: extra,
        released.MISSING: missing,
        released.MISSHAPEN: shapes,
        "tensors that conf/families/ lacks": needed - expected.keys(),
        "copies that differ from their original": differ,
        "Megatron parameters that no tensor fills": unmapped,
    }
    released.require_none(model.folder, problems)


def _demand(bridge, chunks: list) -> tuple[set[str], set[str]]:
    """Return the released tensors that fill the model, and Megatron's parameters that no released tensor fills."""
    registry = bridge._model_bridge.mapping_registry()
    config, names, unmapped = unwrap_model(chunks)[0].config, set(), set()
    for name, _ in named_tensors(chunks):
        if config.share_embeddings_and_output_weights and "output_layer" in name:
            continue  # a copy on the last pipeline stage
        if mapping := registry.megatron_to_hf_lookup(name):
            names |= {*released_names(mapping)}
        else:
            unmapped.add(name)
    parts = gather((names, unmapped))
    return set().union(*(part for part, _ in parts)), set().union(*(part for _, part in parts))


def named_tensors(model):
    """Yield the tensors in a checkpoint of this rank's part, by their names in the whole model."""
    model = unwrap_model(model)
    for stage, chunk in enumerate(model):
        for name, tensor in itertools.chain(chunk.named_parameters(), persistent_buffers(chunk)):
            if "_extra_state" not in name:
                yield _megatron_local_name_to_global(model, chunk.config, name, stage), tensor
