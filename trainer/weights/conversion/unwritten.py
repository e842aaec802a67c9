"""A base without weights (convert.to: none), and readers that present it as a base with weights.

This base lacks only the files of tensors: its metadata point each piece to the release. A piece is made on request by
the code that would have written it (megatron_tensors.py), so its values are bit-identical to those of a complete base.
Megatron's loader requests the pieces, at any layout. Each rank reads only its part, from mapped files. Before that, the
release is compared with its description in the base.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from conf.schema.run import Layout, Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron.model import open_bridge
from trainer.patches.checkpoints import files
from trainer.startup.entry import ALONE
from trainer.weights import released, torch_dist
from trainer.weights.conversion.base import Conversion
from trainer.weights.torch_dist import RELEASED, Stored


class Pieces:
    """Pieces of a base, made from the released tensors. Several threads may request them."""

    def __init__(self, run: Run, base: Path):
        mark = checkpoints.read_mark(base) or {}  # no mark yet during conversion
        model = released.read(Path(run.paths.model))
        known = released.recorded_sums(base) if (base / released.SOURCE).exists() else None
        with _one_process():
            conversion = Conversion(_as_converted(run, mark), open_bridge(run), model, known)
            self.values = conversion.values()
            groups = ProcessGroupCollection.use_mpu_process_groups()
            for task in self.values.tasks.values():  # they outlive the process's own groups
                task.mapping.set_process_groups_from_pg_collection(groups)
        self.by_index = {piece.item.index: piece for piece in conversion.pieces}
        self.lock = threading.Lock()

    def part(self, index: MetadataIndex, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        with self.lock:
            return self.values.part(self.by_index[index], offsets, lengths)


class Reader(FileSystemReader):
    """Reader of a base without weights for Megatron's loader. It is used once, and then drops its pieces."""

    def __init__(self, folder: Path, pieces: Pieces):
        super().__init__(folder)
        self.pieces: Pieces | None = pieces

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        of_release = [item for item in plan.items if self.storage_data[item.storage_index].relative_path == RELEASED]
        assert self.pieces, "the base is read once"
        name = {item.storage_index: self.pieces.by_index[item.storage_index].name for item in of_release}
        for item in sorted(of_release, key=lambda item: name[item.storage_index]):
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.pieces.part(item.storage_index, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        self.pieces = None
        rest = [item for item in plan.items if item.storage_index not in name]
        return super().read_data(replace(plan, items=rest), planner)


def open_base(run: Run, folder: Path) -> Stored:
    """Open a checkpoint, which may be a base without weights."""
    stored = torch_dist.open_checkpoint(folder)
    is_written = all(place.relative_path != RELEASED for place in (stored.metadata.storage_data or {}).values())
    return stored if is_written else replace(stored, make=Pieces(run, folder.parent).part)


def prepare(run: Run) -> None:
    """Make Megatron read the run's base from the release if the base has no weights."""
    base = Path(run.paths.base)
    folder = checkpoints.step_folder(base, 0)
    if require_release(run):
        files.read_by(Reader(folder, Pieces(run, base)), folder)


def _as_converted(run: Run, mark: dict) -> Run:
    """Return the run with the settings of the conversion that affect the contents of a base."""
    keys = (("train", "precision"), ("model", "mtp"), ("moe", "grouped_gemm"))
    changes = {section: {key: mark[key]} for section, key in keys if key in mark}
    return run.model_copy(update={"layout": Layout(tp=mark.get("tp", run.layout.tp))}).changed(**changes)


def require_release(run: Run) -> bool:
    """Return whether the run's base has no weights. If it has none, check that it was made from the run's release.

    If tensors must be read for the check, the ranks of a host share the work.
    """
    base = Path(run.paths.base)
    mark = checkpoints.read_mark(base) or {}
    if "to" not in mark:
        return False
    model = released.read(Path(run.paths.model))
    changed = released.unlike(base, model.tensors)
    if not changed and model.stamps() != mark["stamps"]:
        recorded = released.recorded_sums(base)
        names = sorted(recorded, key=lambda name: model.tensors[name].size)
        rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        expected = {name: recorded[name] for name in names[rank::ranks]}
        sums, _ = released.checksums(model, expected, expected)
        changed = [name for name, checksum in sums.items() if checksum != expected[name]]
    if changed:
        text = f"{len(changed)} tensors are not those that {base} was made from"
        remedy = "download that release again, or make a base of this one: python -m trainer.convert"
        raise Fault(f"{model.folder}: {text}: {released.enumerate_names(sorted(changed))}; {remedy}")
    return True


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Make Megatron treat this process as the only one, unless process groups exist."""
    if distributed.is_initialized():
        yield
        return
    with mock.patch.dict(os.environ, ALONE):
        store = distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            distributed.destroy_process_group()
