"""Conversion of a release to packed files (convert.to: packed): files.py has what they hold, packing.py how it is made.

Tensors are cut into files by the model alone, in its order, and the ranks share the files. A matrix at a time is there
unpacked, made of the release by the code that would have written a base. A file that is finished has an entry in a
journal, with its checksum and how far each of its matrices lies from the release; a later attempt takes it as it is.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file

from conf.rules.packed_base import Format, format_of
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron.packed_base import weight
from trainer.weights import atomic_folder, file_sums, journal, released
from trainer.weights.conversion import unwritten
from trainer.weights.packed_base import files, packing, parts
from trainer.weights.packed_base.part import Part
from trainer.weights.quantised import report

LARGEST = 2**29  # numbers of a file


@dataclass(frozen=True)
class Tensor:
    name: str  # Megatron's
    parts: tuple[Part, ...]
    packed: bool

    @property
    def size(self) -> int:
        return sum(torch.Size(part.sizes).numel() for part in self.parts)


@torch.no_grad()
def write(run: Run, chunks: list, base: Path, noted: Path) -> None:
    """Write the packed files of a base into its folder, over all ranks. `chunks` are its model, without memory."""
    form, folder = format_of(run), base / files.FOLDER
    assert form, "model.base says how"
    atomic_folder.barrier()  # until the first rank has written what leads to the pieces
    stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
    units, release = cut(tensors(run, unwrap_model(chunks))), packing.release(run, form, chunks[0].config)
    described = {one.name for unit in units for one in unit}
    if described != stored.places.keys():
        odd = released.enumerate_names(sorted(described ^ stored.places.keys()))
        raise Fault(f"{base}: the packed files and the base would hold other tensors: {odd}")
    folder.mkdir(exist_ok=True)
    noted.mkdir(exist_ok=True)

    def make(number: int) -> journal.Entry:
        rows: list[report.Row] = []
        source = packing.Packing(form, stored, release, rows, "cpu")
        content, index = _packed(form, source, units[number], _name(number))
        save_file(content, folder / _name(number))
        return {
            "sum": _checksum(folder / _name(number)),
            "index": index,
            "rows": [asdict(row) for row in rows],
            "bytes": sum(one.nbytes for name, one in content.items() if name.endswith(files.ENDS)),
        }

    entries = journal.do(
        noted,
        {number: sum(one.size for one in unit) for number, unit in enumerate(units)},
        lambda number, entry: _checksum(folder / _name(number)) == entry.get("sum"),
        make,
        ahead=lambda number: None,
    )
    if atomic_folder.rank() == 0:
        every = [entry["index"] for _, entry in sorted(entries.items())]
        files.write_index(folder, {name: row for index in every for name, row in index.items()})
        rows = [report.row_of(row) for entry in entries.values() for row in entry["rows"]]
        report.store(base, run.model.base, rows, sum(entry["bytes"] for entry in entries.values()))


def tensors(run: Run, chunks: list) -> list[Tensor]:
    """All tensors of a base, in the model's order."""
    found = []
    for chunk in chunks:
        of_chunk = parts.of_chunk(chunk)
        layers = [(layer, names) for _, layer, names in weight.layers(chunk, run) if _is_of_transformer_engine(layer)]
        packed = {parts.storage(layer._parameters[name]) for layer, names in layers for name in names}
        found += [Tensor(made[0].name, tuple(made), place in packed) for place, made in of_chunk.items()]
    return found


def _is_of_transformer_engine(layer: Any) -> bool:
    """Whether the layer would ask a weight to unpack itself. Routers, which have no memory here either, do not."""
    return any(kind.__module__ == transformer_engine.__name__ for kind in type(layer).__mro__)


def cut(every: list[Tensor]) -> list[list[Tensor]]:
    """Tensors of each file."""
    found: list[list[Tensor]] = []
    size = LARGEST
    for one in every:
        if size >= LARGEST:
            found.append([])
            size = 0
        found[-1].append(one)
        size += one.size
    return found


def _packed(
    form: Format, source: packing.Packing, unit: list[Tensor], file: str
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Content of a file, and its rows of the index."""
    content: dict[str, torch.Tensor] = {}
    index: dict[str, dict[str, Any]] = {}
    for one in unit:
        if not one.packed:
            shape = source.shape(one.name)
            content[one.name] = source.box(one.name, (0,) * len(shape), shape)
            index[one.name] = files.with_sums({"file": file}, content, one.name)
            continue
        height = source.height(one.parts[0])
        found = [source.of_part(part, (height, form.block[1])) for part in one.parts]
        content[one.name + files.CODES] = torch.cat([codes for codes, _, _ in found])
        content[one.name + files.SCALES] = torch.stack([scales for _, scales, _ in found])
        if form.factor_bytes:
            content[one.name + files.FACTORS] = torch.stack([factor for _, _, factor in found if factor is not None])
        row = {"file": file, "height": height, "matrices": len(found)}
        index[one.name] = files.with_sums(row, content, one.name)
    return content, index


def _name(number: int) -> str:
    return f"{number:05d}.safetensors"


def _checksum(path: Path) -> str:
    """Checksum of a file; "" if it is missing."""
    try:
        with path.open("rb") as file:
            return file_sums.of(file)
    except OSError:
        return ""
