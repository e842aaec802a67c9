"""A packed frozen base (model.base), loaded into the layers of a model one after another.

No rank holds its weights unpacked: the model is built without memory for packed layers. From a base packed once
(convert.to: packed), a rank reads its part of the codes and scales (files.py). From other bases, each matrix is read,
moved to the device, packed and dropped (packing.py). The codes are the same. quantised/report.py reports the error of
each matrix relative to the base.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

import itertools
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from megatron.core.utils import unwrap_model

from conf.rules.packed_base import FORMATS, Format
from conf.schema.run import Run
from contract import checkpoints
from trainer.megatron import precision
from trainer.megatron.packed_base import weight
from trainer.megatron.packed_base.codes import SCALES
from trainer.patches.checkpoints import base_loading
from trainer.weights import model_digests, torch_dist
from trainer.weights.conversion import unwritten
from trainer.weights.conversion.megatron_tensors import storage
from trainer.weights.coverage import VOCABULARY
from trainer.weights.packed_base import files, packing
from trainer.weights.packed_base.part import Part
from trainer.weights.quantised import report

Source = files.Packed | packing.Packing  # of the codes of parts


def prepare(run: Run) -> None:
    """Make Megatron-Bridge build the model without memory for packed layers, and load them by load()."""
    base, form, stored = Path(run.paths.base), FORMATS[run.model.base], None
    if (checkpoints.read_mark(base) or {}).get("to") != "packed":
        unwritten.require_release(run)
        stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
    end = base_loading.build_without_memory()

    def load_once(model: list) -> None:
        end()
        chunks, output = unwrap_model(model), Path(run.paths.output)
        if not stored:
            report.repeat(base, output, load(form, run, files.open_packed(base, form), chunks))
            return
        rows: list[report.Row] = []
        source = packing.Packing(form, stored, packing.release(run, form, chunks[0].config), rows, "cuda")
        report.write(output, run.model.base, rows, load(form, run, source, chunks))

    base_loading.load_by(load_once, base)


@torch.no_grad()
def load(form: Format, run: Run, source: Source, chunks: list) -> int:
    """Fill the chunks of a model. Return the bytes of packed weights."""
    dtype, count = precision.dtype(run.train.precision), 0
    for chunk in chunks:
        # storages are identified by address, so the tensors must stay alive
        parts_of, _held = of_chunk(chunk), [*chunk.parameters(), *chunk.buffers()]
        for _, layer, names in [*weight.layers(chunk, run)]:
            matrices = [parts_of.pop(storage(layer._parameters[name])) for name in names]
            weight.attach(layer, names, held := store(form, dtype, source, matrices))
            vars(layer)[weight.PARTS] = matrices
            count += held.bytes
        for old, new in weight.fill(chunk):
            parts_of[storage(new)] = parts_of.pop(storage(old))
        for tensor, of_tensor in _others(chunk, parts_of):
            for part in of_tensor:
                _copy(source, part, tensor)
    return count


def of_chunk(chunk: Any) -> dict[int, list[Part]]:
    """Return the parts of the base in each tensor of the chunk, by the tensor's storage."""
    result: dict[int, list[Part]] = {}
    for value in nested_values(chunk.sharded_state_dict(metadata=model_digests.metadata())):
        if not isinstance(value, ShardedTensor | ShardedTensorFactory) or torch_dist.NOT_WEIGHTS.search(value.key):
            continue
        state = {"tensor": value}
        apply_factories(state)
        tensors = [tensor for tensor in nested_values(state) if isinstance(tensor, ShardedTensor)]
        keys = [tensor.key for tensor in tensors]  # stacked matrices have the same one, sections do not
        numbers = [(keys[:place].count(key), keys.count(key)) for place, key in enumerate(keys)]
        parts = [_part(tensor, value.data, number) for tensor, number in zip(tensors, numbers, strict=True)]
        result[storage(value.data)] = parts
    return result


def _part(tensor: ShardedTensor, whole: torch.Tensor, matrix: tuple[int, int]) -> Part:
    depth = torch_dist.depth(tensor.key, len(tensor.global_shape))
    assert tensor.prepend_axis_num == depth, f"{tensor.key} is not stacked like in a base"
    stride = whole.stride(0) if whole.ndim else 1
    start = int(tensor.data.storage_offset() - whole.storage_offset()) // max(1, stride)
    assert tensor.data.shape[1:] == whole.shape[1:], f"{tensor.key} is not cut by rows"
    name = torch_dist.name_of(tensor.key, tensor.global_offset[:depth])
    return Part(start, name, tuple(tensor.global_offset[depth:]), tuple(tensor.data.shape), matrix)


def store(form: Format, dtype: torch.dtype, source: Source, matrices: list[list[Part]]) -> weight.Store:
    """Return codes and scales of a layer's matrices, which have equal shapes."""
    all_parts = [*itertools.chain(*matrices)]
    starts = [part.offsets[0] - part.begin(source.shape(part.name)[0]) for part in all_parts]
    height = gcd(form.block[0], *starts, *(part.start for part in all_parts), *map(source.height, all_parts))
    width = gcd(form.block[1], *(part.offsets[1] for part in all_parts))
    rows, columns = sum(part.sizes[0] for part in matrices[0]), matrices[0][0].sizes[1]
    kind = torch.float8_e4m3fn if form.kind == "fp8" else torch.uint8
    codes = torch.empty((len(matrices), rows, columns * form.bits // 8), dtype=kind, device="cuda")
    blocks = (len(matrices), -(-rows // height), -(-columns // width))
    scales = torch.empty(blocks, dtype=SCALES[form.kind], device="cuda")
    factors = torch.ones((len(matrices), len(matrices[0])), device="cuda") if form.factor_bytes else None
    for number, matrix in enumerate(matrices):
        equal = len({part.sizes[0] for part in matrix}) == 1
        assert equal or not form.factor_bytes, "stacked matrices must have equal numbers of rows"
        for place, part in enumerate(sorted(matrix, key=lambda part: part.start)):
            part_codes, of_blocks, factor = source.of_part(part, (height, width))
            codes[number, part.start : part.start + part.sizes[0]] = part_codes
            first = part.start // height
            scales[number, first : first + len(of_blocks)] = of_blocks
            if factors is not None:
                factors[number, place] = factor
    return weight.Store(codes, scales, (height, width), dtype, factors)


def _copy(source: Source, part: Part, tensor: torch.Tensor) -> None:
    """Copy a part into a tensor that is not packed. A vocabulary's padding may differ from the base's."""
    if not tensor.ndim:
        tensor.copy_(source.box(part.name, part.offsets, part.sizes))
        return
    count = part.sizes[0]
    if part.name.endswith(VOCABULARY):
        count = max(0, min(count, source.shape(part.name)[0] - part.offsets[0]))
        tensor[part.start + count : part.start + part.sizes[0]] = 0
    rows = slice(part.start, part.start + count)
    tensor[rows].copy_(source.box(part.name, part.offsets, (count, *part.sizes[1:])))


def _others(chunk: Any, parts_of: dict[int, list[Part]]) -> Iterator[tuple[torch.Tensor, list[Part]]]:
    """Yield tensors that are loaded unpacked, each with its parts."""
    for tensor in itertools.chain(chunk.parameters(), chunk.buffers()):
        if not isinstance(tensor, weight.PackedWeight) and storage(tensor) in parts_of:
            yield tensor.detach(), parts_of.pop(storage(tensor))
    left = [part.name for of_tensor in parts_of.values() for part in of_tensor]
    assert not left, f"{left} belong to no tensor of the model"
