"""A frozen base that is packed while it is loaded (model.base), one layer after another.

No rank ever holds its weights unpacked: the model is built without memory for the layers that are packed, and each
matrix is read from the base, put on the device, packed and dropped. Blocks are those of whole matrices: where a rank's
part begins or ends within one, what is missing of the block is read too, so that the codes are the same at any layout.
A release in the same format keeps its codes and scales (quantised/taken_over.py). quantised/report.py says how far each
matrix then lies from the base.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from megatron.core.utils import unwrap_model

from conf.model_files import config_json, quantization
from conf.model_files.quantization import Packed, Scheme
from conf.rules.packed_base import Format, format_of
from conf.schema.run import Run
from contract import checkpoints
from trainer.megatron import precision
from trainer.megatron.model import open_bridge
from trainer.megatron.packed_base import weight
from trainer.megatron.packed_base.codes import SCALES
from trainer.patches.checkpoints import base_loading
from trainer.weights import released, torch_dist
from trainer.weights.conversion import unwritten
from trainer.weights.model_digests import METADATA
from trainer.weights.quantised import e2m1, pack, report, taken_over
from trainer.weights.torch_dist import Stored


@dataclass(frozen=True)
class Part:
    """Rows of a parameter, and the box of a stored tensor that they are."""

    start: int  # first row in the parameter
    name: str  # Megatron's, in the whole model
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    matrix: tuple[int, int] = (
        0,
        1,
    )  # of those that are stored one below the other, as gate and up are: which, of how many


def prepare(run: Run) -> None:
    """Have Megatron-Bridge build the model without memory for what is packed, and load it by load()."""
    base = Path(run.paths.base)
    unwritten.require_release(run)
    stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
    end = base_loading.build_without_memory()

    def load_once(model: list) -> None:
        end()
        load(run, stored, model)

    base_loading.load_by(load_once, base)


@torch.no_grad()
def load(run: Run, stored: Stored, model: list) -> None:
    """Fill the chunks of a model with what the base holds."""
    form, dtype = format_of(run), precision.dtype(run.train.precision)
    assert form, "model.base says how"
    noted: list[report.Row] = []
    count = 0
    for chunk in unwrap_model(model):
        packer = Packer(form, dtype, stored, _release(run, form, chunk.config), noted)
        parts, _held = _parts(chunk), [*chunk.parameters(), *chunk.buffers()]  # storages are known by their addresses
        for _, layer, names in [*weight.layers(chunk)]:
            matrices = [parts.pop(_storage(layer._parameters[name])) for name in names]
            weight.attach(layer, names, held := packer.store(matrices))
            count += held.bytes
        for old, new in weight.fill(chunk):
            parts[_storage(new)] = parts.pop(_storage(old))
        for tensor, of_tensor in _others(chunk, parts):
            for part in of_tensor:
                rows = slice(part.start, part.start + part.sizes[0]) if tensor.ndim else ...
                tensor[rows].copy_(torch_dist.box(stored, part.name, part.offsets, part.sizes))
    report.write(Path(run.paths.output), run.model.base, noted, count)


def _release(run: Run, form: Format, config: Any) -> taken_over.Release | None:
    """The release, where its config.json says that it is quantised."""
    folder = Path(run.paths.model)
    if not config_json.read(folder / config_json.NAME).get(quantization.KEY):
        return None
    registry = open_bridge(run)._model_bridge.mapping_registry()
    found = taken_over.Release(released.read(folder), form, registry, config)
    return found if found.names else None


@dataclass(frozen=True)
class Packer:
    """Source of packed layers, and the list of what packing them loses."""

    form: Format
    dtype: torch.dtype
    stored: Stored
    release: taken_over.Release | None
    rows: list[report.Row]

    def store(self, matrices: list[list[Part]]) -> weight.Store:
        """Codes and scales of a layer's matrices, which are all alike."""
        form, parts = self.form, [*itertools.chain(*matrices)]
        starts = [part.offsets[0] - self._begin(part) for part in parts] + [part.start for part in parts]
        height = gcd(form.block[0], *starts, *map(self._height, parts))
        width = gcd(form.block[1], *(part.offsets[1] for part in parts))
        rows, columns = sum(part.sizes[0] for part in matrices[0]), matrices[0][0].sizes[1]
        kind = torch.float8_e4m3fn if form.kind == "fp8" else torch.uint8
        codes = torch.empty((len(matrices), rows, columns * form.bits // 8), dtype=kind, device="cuda")
        blocks = (len(matrices), -(-rows // height), -(-columns // width))
        scales = torch.empty(blocks, dtype=SCALES[form.kind], device="cuda")
        factors = torch.ones((len(matrices), len(matrices[0])), device="cuda") if form.factor_bytes else None
        for number, matrix in enumerate(matrices):
            assert not form.factor_bytes or len({part.sizes[0] for part in matrix}) == 1, "one below the other, alike"
            for place, part in enumerate(sorted(matrix, key=lambda part: part.start)):
                found, of_blocks, factor = self._of_part(part, (height, width))
                codes[number, part.start : part.start + part.sizes[0]] = found
                first = part.start // height
                scales[number, first : first + len(of_blocks)] = of_blocks
                if factors is not None:
                    factors[number, place] = factor
        return weight.Store(codes, scales, (height, width), self.dtype, factors)

    def _begin(self, part: Part) -> int:
        """Row of the stored tensor at which the part's matrix begins."""
        number, count = part.matrix
        return self.stored.places[part.name].shape[0] // count * number

    def _height(self, part: Part) -> int:
        scales = self._released(part)
        return scales.height(part.matrix[1], self.form.block[0]) if scales else self.form.block[0]

    def _released(self, part: Part) -> taken_over.Scales | None:
        return self.release and self.release.scales(part.name, self.stored.places[part.name].shape[0])

    def _of_part(self, part: Part, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes of a part, scales of its blocks, which lie within those of the matrix, and the matrix's factor."""
        if scales := self._released(part):
            read = torch_dist.box(self.stored, part.name, part.offsets, part.sizes).to("cuda")
            found = taken_over.codes(self.form, scales, read, (part.offsets[0], part.offsets[1]), block)
            if found:
                self._note(part, read, *found, None, block, as_released=True)
                return *found, None
        form, (height, width) = self.form, self.stored.places[part.name].shape
        begin, whole = self._begin(part), (height // part.matrix[1], width)
        inside = (part.offsets[0] - begin, part.offsets[1])
        sizes = whole if form.factor_bytes else form.block  # the factor is of the largest number of all
        first = [offset // size * size for offset, size in zip(inside, sizes, strict=True)]
        last = [
            min(length, -(-(offset + count) // size) * size)
            for offset, count, size, length in zip(inside, part.sizes, sizes, whole, strict=True)
        ]
        lengths = (last[0] - first[0], last[1] - first[1])
        read = torch_dist.box(self.stored, part.name, (begin + first[0], first[1]), lengths).to("cuda")
        codes, of_blocks, factor = _pack(form, read)
        (top, left), (rows, columns) = (o - start for o, start in zip(inside, first, strict=True)), part.sizes
        each = 8 // form.bits
        codes = codes[top : top + rows, left // each : (left + columns) // each]
        places = [
            (torch.arange(-(-count // small), device=codes.device) * small + begin) // size
            for count, small, begin, size in zip((rows, columns), block, (top, left), form.block, strict=True)
        ]
        of_blocks = of_blocks[places[0]][:, places[1]]
        self._note(part, read[top : top + rows, left : left + columns], codes, of_blocks, factor, block)
        return codes, of_blocks, factor

    def _note(
        self,
        part: Part,
        read: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        factor: torch.Tensor | None,
        block: tuple[int, int],
        as_released: bool = False,
    ) -> None:
        factors = None if factor is None else factor.view(1, 1)
        (found,) = weight.Store(codes[None].contiguous(), scales[None], block, torch.float32, factors).unpack()
        self.rows.append(report.row(part.name, part.offsets, read, found, as_released))


def _pack(form: Format, read: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes and scales of whole blocks, and the factor of a whole matrix."""
    if form.kind == "nvfp4":
        return e2m1.nvfp4(read)
    if form.kind == "mxfp4":
        return *e2m1.mxfp4(read), None
    scheme, kind = Scheme(form.kind, "", "", form.block, form.bits), SCALES[form.kind]
    codes, scales = pack.pack(Packed(scheme, (read.shape[0], read.shape[1]), "", ""), read, kind)
    return codes.view(torch.uint8) if form.kind == "int" else codes, scales.to(kind), None


def _parts(chunk: Any) -> dict[int, list[Part]]:
    """What the base holds of each tensor of the chunk, by the tensor's storage."""
    found: dict[int, list[Part]] = {}
    for value in nested_values(chunk.sharded_state_dict(metadata=METADATA)):
        if not isinstance(value, ShardedTensor | ShardedTensorFactory) or torch_dist.NOT_WEIGHTS.search(value.key):
            continue
        state = {"tensor": value}
        apply_factories(state)
        made = [one for one in nested_values(state) if isinstance(one, ShardedTensor)]
        numbers = ((i, len(made)) for i in range(len(made)))
        found[_storage(value.data)] = [
            _part(one, value.data, number) for one, number in zip(made, numbers, strict=True)
        ]
    return found


def _part(one: ShardedTensor, whole: torch.Tensor, matrix: tuple[int, int]) -> Part:
    depth = torch_dist.depth(one.key)
    assert one.prepend_axis_num == depth, f"{one.key} is stacked in another way than a base is"
    stride = whole.stride(0) if whole.ndim else 1
    start = int(one.data.storage_offset() - whole.storage_offset()) // max(1, stride)
    assert one.data.shape[1:] == whole.shape[1:], f"{one.key} is cut into other parts than rows"
    name = torch_dist.name_of(one.key, one.global_offset[:depth])
    return Part(start, name, tuple(one.global_offset[depth:]), tuple(one.data.shape), matrix)


def _others(chunk: Any, parts: dict[int, list[Part]]) -> Iterator[tuple[torch.Tensor, list[Part]]]:
    """Tensors that are loaded as they are, each with its parts."""
    for tensor in itertools.chain(chunk.parameters(), chunk.buffers()):
        if not isinstance(tensor, weight.PackedWeight) and _storage(tensor) in parts:
            yield tensor.detach(), parts.pop(_storage(tensor))
    assert not parts, (
        f"{[part.name for of_tensor in parts.values() for part in of_tensor]} are of no tensor of the model"
    )


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata
