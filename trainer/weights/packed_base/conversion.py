"""Conversion of a release to packed files (convert.to: packed); files.py describes them, packing.py makes the codes.

Only the model determines how tensors are divided into files, in the model's order. The ranks share the files. Each rank
has a process on each core, at most PROCESSES, that packs one file at a time. Threads needed 5 minutes for 46 GB on 64
cores. Weights are unpacked by the same code that writes an unpacked base. A finished file has an entry in a journal,
with its checksum and the error of each of its matrices relative to the release. A later attempt keeps the file.
"""

import itertools
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.utils import unwrap_model
from safetensors.torch import save_file

from conf.rules.packed_base import FORMATS, Format
from conf.schema.run import Run
from contract import checkpoints, processes
from contract.faults import Fault
from trainer.megatron.packed_base import weight
from trainer.startup import device
from trainer.weights import atomic_folder, file_sums, journal, released
from trainer.weights.conversion import unwritten
from trainer.weights.conversion.megatron_tensors import storage
from trainer.weights.packed_base import files, packing
from trainer.weights.packed_base.loading import of_chunk
from trainer.weights.packed_base.part import Part
from trainer.weights.quantised import report

LARGEST = 2**29  # values per file
PROCESSES = 16  # of a rank: they pack faster than a disk writes


@dataclass(frozen=True)
class Tensor:
    name: str  # Megatron's
    parts: tuple[Part, ...]
    packed: bool

    @property
    def size(self) -> int:
        return sum(torch.Size(part.sizes).numel() for part in self.parts)


@torch.no_grad()
def write(run: Run, chunks: list, base: Path, journal_folder: Path) -> None:
    """Write the packed files of a base into its folder, over all ranks. `chunks` are the model without memory."""
    form, folder = FORMATS[run.model.base], base / files.FOLDER
    atomic_folder.barrier()  # until rank 0 has written the index of the pieces
    stored = unwritten.open_base(run, checkpoints.step_folder(base, 0))
    every, release = tensors(run, unwrap_model(chunks)), packing.release(run, form, chunks[0].config)
    units = journal.cut({tensor: tensor.size for tensor in every}, LARGEST)
    described = {tensor.name for tensor in every}
    if described != stored.places.keys():
        odd = released.enumerate_names(sorted(described ^ stored.places.keys()))
        raise Fault(f"{base}: the packed files and the base would have different tensors: {odd}")
    folder.mkdir(exist_ok=True)
    journal_folder.mkdir(exist_ok=True)

    torch.set_num_threads(1)  # of each process
    work = Work(form, packing.Packing(form, stored, release, None, "cpu"), folder, units)
    count, started = min(device.cores(), PROCESSES), dict[int, Future[journal.Entry]]()
    fork = multiprocessing.get_context("fork")  # the processes have all that this one has read
    pool = ProcessPoolExecutor(count, fork, initializer=_begin, initargs=(work, os.getpid()))

    def ahead(number: int) -> None:
        started[number] = pool.submit(_file, number)

    def make(number: int) -> journal.Entry:
        try:
            return started.pop(number).result()
        except BrokenProcessPool:
            raise Fault(f"{folder}: a process that packs was killed; the host may lack memory") from None

    try:
        entries = journal.do(
            journal_folder,
            {number: sum(tensor.size for tensor in unit) for number, unit in enumerate(units)},
            lambda number, entry: _checksum(folder / _name(number)) == entry.get("sum"),
            make,
            ahead=ahead,
            distance=count,
        )
    finally:
        pool.shutdown(cancel_futures=True)
    if atomic_folder.rank() == 0:
        indexes = [entry["index"] for _, entry in sorted(entries.items())]
        files.write_index(folder, {name: row for index in indexes for name, row in index.items()})
        rows = [report.Row(**row) for entry in entries.values() for row in entry["rows"]]
        count = sum(entry["bytes"] for entry in entries.values())
        report.store(base, report.summary(run.model.base, rows, [count]))


def tensors(run: Run, chunks: list) -> list[Tensor]:
    """Return all tensors of a base, in the model's order."""
    result = []
    for chunk in chunks:
        layers = [(layer, names) for _, layer, names in weight.layers(chunk, run) if _is_of_transformer_engine(layer)]
        packed = {storage(getattr(layer, name)) for layer, names in layers for name in names}
        for place, parts in of_chunk(chunk).items():  # the sections of a weight are tensors of the base
            by_name = itertools.groupby(parts, key=lambda part: part.name)
            result += [Tensor(name, tuple(same), place in packed) for name, same in by_name]
    return result


def _is_of_transformer_engine(layer: Any) -> bool:
    """Whether the layer can use a packed weight. Routers cannot, although they have no memory here either."""
    return any(kind.__module__ == transformer_engine.__name__ for kind in type(layer).__mro__)


@dataclass(frozen=True)
class Work:
    """Input of the processes, which inherit it."""

    form: Format
    source: packing.Packing
    folder: Path
    units: list[list[Tensor]]


_work: Work | None = None  # of a process that packs


def _begin(work: Work, parent: int) -> None:
    global _work
    processes.end_with_parent(parent)
    _work = work


def _file(number: int) -> journal.Entry:
    """Pack and write a file. Return its entry."""
    assert _work is not None
    content, index, rows = dict[str, torch.Tensor](), dict[str, dict[str, Any]](), list[report.Row]()
    for tensor in _work.units[number]:
        of_tensor, index[tensor.name], losses = _packed(_work.form, _work.source, tensor, _name(number))
        content, rows = content | of_tensor, rows + losses
    path = _work.folder / _name(number)
    save_file(content, path)
    return {
        "sum": _checksum(path),
        "index": index,
        "rows": [asdict(row) for row in rows],
        "bytes": sum(tensor.nbytes for name, tensor in content.items() if name.endswith(files.ENDS)),
    }


@torch.no_grad()
def _packed(
    form: Format, source: packing.Packing, tensor: Tensor, file: str
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[report.Row]]:
    """Return the content of a tensor, its row of the index, and the losses of its matrices."""
    name, rows, content = tensor.name, list[report.Row](), dict[str, torch.Tensor]()
    if not tensor.packed:
        shape = source.shape(name)
        content[name] = source.box(name, (0,) * len(shape), shape)
        return content, files.with_sums({"file": file}, content, name), rows
    source, height = replace(source, rows=rows), source.height(tensor.parts[0])
    parts = [source.of_part(part, (height, form.block[1])) for part in tensor.parts]
    content[name + files.CODES] = torch.cat([codes for codes, _, _ in parts])
    content[name + files.SCALES] = torch.stack([scales for _, scales, _ in parts])
    if form.factor_bytes:
        content[name + files.FACTORS] = torch.stack([factor for _, _, factor in parts if factor is not None])
    row = {"file": file, "height": height, "matrices": len(parts)}
    return content, files.with_sums(row, content, name), rows


def _name(number: int) -> str:
    return f"{number:05d}.safetensors"


def _checksum(path: Path) -> str:
    """Return the checksum of a file; "" if it is missing."""
    try:
        return file_sums.of(path)
    except OSError:
        return ""
