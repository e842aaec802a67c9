"""Shards of a checkpoint: files of a few hundred megabytes, each written by one process, and kept if it dies.

The model alone determines how tensors are cut into shards, so any number of processes writes the same files. A finished
shard has an entry in a journal next to the files: the place and checksum of each piece, and the checksums of the
released tensors from which it was made. A later attempt keeps shards whose entry and checksums are valid.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from contract import checksums
from contract.files import sync
from trainer.weights import file_sums, released, torch_dist
from trainer.weights.conversion import tiling
from trainer.weights.conversion.megatron_tensors import Piece, Values
from trainer.weights.conversion.summed_stream import SummedStream
from trainer.weights.released import Model

LARGEST, SMALLEST = 2**28, 2**20
COUNT = 256  # of shards, if their size is between these two


@dataclass(frozen=True)
class Shard:
    number: int
    pieces: tuple[Piece, ...]
    tensors: tuple[str, ...]  # released tensors; each belongs to one shard

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def cut(pieces: list[Piece], made_of: dict[str, list[str]], model: Model) -> list[Shard]:
    """Cut the pieces into shards, in order. Everything made from one released tensor is in one shard.

    `made_of` has the released tensors of each parameter. Unused released tensors get shards without pieces, to be read
    once.
    """
    whole = sum(piece.size for piece in pieces)
    enough = min(max(whole // COUNT, SMALLEST), LARGEST)
    shards: list[Shard] = []
    for together, names in _groups(pieces, made_of):
        known = tuple(name for name in names if name in model.tensors)
        if shards and shards[-1].size < enough:
            last = shards[-1]
            shards[-1] = Shard(last.number, last.pieces + together, last.tensors + known)
        else:
            shards.append(Shard(len(shards), together, known))
    used = {name for shard in shards for name in shard.tensors}
    rest = [Shard(0, (), (name,)) for name in sorted(model.tensors.keys() - used)]
    return [replace(shard, number=number) for number, shard in enumerate([*shards, *rest])]


def digest(shards: list[Shard]) -> str:
    """Return the digest of contents and places of all shards."""
    lines = [
        [shard.number, [[repr(piece.item), piece.name, piece.start] for piece in shard.pieces], shard.tensors]
        for shard in shards
    ]
    return checksums.of(json.dumps(lines))


class Planner(MCoreSavePlanner):
    """Megatron-core's planner of a save, whose tensors are made when they are written."""

    def __init__(self, objects: dict[str, io.BytesIO], pieces: Iterable[Piece], values: Values | None):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects, self.values = objects, values
        self.pieces = {piece.item.index: piece for piece in pieces}

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan like torch, with a faster proof that pieces cover each tensor."""
        plans, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata) and not tiling.is_tiled(stored.size, stored.chunks):
                raise ValueError(f"{key}: its pieces do not cover it")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem):
        if write_item.type == WriteItemType.BYTE_IO:
            return self.objects[write_item.index.fqn]
        assert self.values, "a base without weights has no values"
        return self.values.of(self.pieces[write_item.index])


class Writer(FileSystemWriter):
    """Torch's writer of files, one per shard. It records the pieces' checksums, but neither time nor place."""

    def __init__(self, folder: Path):
        # Files are synced in parallel with the next one; nothing is loaded ahead, because tensors are on the CPU.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _Checksummed()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Work:
    """Writer of a checkpoint's files into a folder.

    Without `values` no files of tensors are written: the metadata point to the release.
    """

    def __init__(self, folder: Path, shards: list[Shard], objects: list[ShardedObject], values: Values | None):
        self.folder, self.shards, self.values = folder, shards, values
        self.pool, self.synced = ThreadPoolExecutor(1), []
        main_objects = {item.unique_key: [item] for item in objects if is_main_replica(item.replica_id)}
        contents = mcore_to_pyt_state_dict(main_objects)
        plans = [SavePlan([piece.item for piece in shard.pieces]) for shard in shards]
        plans.append(SavePlan([WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in contents]))
        self.planner = Planner(contents, (piece for shard in shards for piece in shard.pieces), values)
        self.writer = Writer(folder)
        plans, self.metadata = self.planner.create_global_plan(plans)
        self.plans = self.writer.prepare_global_plan(plans)

    def is_whole(self, number: int, entry: dict) -> bool:
        """Whether the shard's file is unchanged since it was written."""
        if not self._has_file(number):
            return True
        try:
            with (self.folder / self._name(number)).open("rb") as f:
                places = zip(entry["places"], entry["sums_of_pieces"], strict=True)
                return all(file_sums.of(f, *place) == one for place, one in places)
        except (OSError, LookupError, TypeError, ValueError):  # no file, or an entry of another version
            return False

    def make(self, number: int, model: Model, known: dict[str, str] | None) -> dict:
        """Write a shard, and return its entry. `known` are checksums of the released tensors, or None."""
        shard = self.shards[number]
        sums = {name: known[name] for name in shard.tensors} if known else _checksums(model, shard.tensors)
        entry = self._write(number) | {"sums": sums}
        if self._has_file(number):
            self.synced.append(self.pool.submit(sync, self.folder / self._name(number)))
        self._raise_of_synced()
        return entry

    def wait(self) -> None:
        """Wait until the disk has all written files."""
        self.pool.shutdown()
        self._raise_of_synced()

    def _raise_of_synced(self) -> None:
        for future in [future for future in self.synced if future.done()]:
            future.result()
            self.synced.remove(future)

    def finish(self, entries: dict[int, dict]) -> None:
        """Write the objects, and the metadata of all pieces. Only rank 0 calls this."""
        last = len(self.shards)
        every = dict(sorted((entries | {last: self._write(last)}).items()))
        results, sums = [], dict[str, str]()
        for number, entry in every.items():
            items, name = self.plans[number].items, self._name(number)
            results.append(
                [
                    WriteResult(item.index, length, _StorageInfo(name, offset, length))
                    for item, (offset, length) in zip(items, entry["places"], strict=True)
                ]
            )
            of_pieces = zip(entry["places"], entry.get("sums_of_pieces", []), strict=False)
            sums |= {file_sums.name(name, offset): one for (offset, _), one in of_pieces}
        file_sums.write(self.folder, sums)
        self.writer.finish(self.metadata, results)

    def _write(self, number: int) -> dict:
        plan = self.plans[number]
        if not self._has_file(number):
            return {"places": [[0, 0] for _ in plan.items]}
        with _without_archive_sums():
            written = self.writer.write_data(plan, self.planner).wait()
        results = {result.index: result.storage_data for result in written}
        if self.values:
            self.values.forget()
        places = [results[item.index] for item in plan.items]
        sums = [self.writer.fs.sums[place.offset] for place in places]
        return {"places": [[place.offset, place.length] for place in places], "sums_of_pieces": sums}

    def _has_file(self, number: int) -> bool:
        return bool(self.plans[number].items) and (self.values is not None or number == len(self.shards))

    def _name(self, number: int) -> str:
        return (
            torch_dist.RELEASED if not self._has_file(number) else f"{self.plans[number].storage_data.prefix}0.distcp"
        )


@contextlib.contextmanager
def _without_archive_sums() -> Iterator[None]:
    """Make torch write no CRC-32 of a piece, which would take most of the time; pieces have another checksum."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Checksummed(FileSystem):
    """Torch's file system, with the checksums of the pieces of the last written file."""

    sums: dict[int, str]  # by start offset

    @contextlib.contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = SummedStream(stream)
            try:
                yield summed
                stream.flush()
            except Exception as error:
                if summed.error:  # torch reports that writing failed, but not the cause
                    raise summed.error from error
                raise
            summed.end_piece()
            self.sums = summed.sums


def _groups(pieces: list[Piece], made_of: dict[str, list[str]]) -> list[tuple[tuple[Piece, ...], list[str]]]:
    """Return groups of pieces that must stay together, with the released tensors of each group."""
    of_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_parameter.setdefault(piece.name, []).append(piece)
    groups: list[tuple[list[Piece], dict[str, None]]] = []
    where: dict[str, int] = {}
    for name, together in of_parameter.items():
        number = next((where[one] for one in made_of[name] if one in where), len(groups))
        if number == len(groups):
            groups.append(([], {}))
        groups[number][0].extend(together)
        for one in made_of[name]:
            where.setdefault(one, number)
            if where[one] == number:
                groups[number][1][one] = None
    return [(tuple(together), list(names)) for together, names in groups]


def _checksums(model: Model, names: tuple[str, ...]) -> dict[str, str]:
    sums, infinite = released.checksums(model, names)
    if infinite:
        raise released.not_finite(model, infinite)
    return sums
