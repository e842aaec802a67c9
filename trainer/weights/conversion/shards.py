"""Shards of a checkpoint: files of a few hundred megabytes, each made by one process, and kept when that dies.

How tensors are cut into shards depends on the model alone, so any number of processes makes the same files. A shard
that is finished has an entry in a journal beside the files: where each piece lies in it, with its checksum, and the
checksums of the released tensors that it was made of. A later attempt takes what has an entry and those checksums.
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
COUNT = 256  # of a model whose shards are between those two


@dataclass(frozen=True)
class Shard:
    number: int
    pieces: tuple[Piece, ...]
    tensors: tuple[str, ...]  # released ones, each of which belongs to one shard

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def cut(pieces: list[Piece], made_of: dict[str, list[str]], model: Model) -> list[Shard]:
    """Shards of the pieces, in their order. All that is made of one released tensor is in one of them.

    `made_of` are the released tensors of each parameter. Those of none are in shards without pieces, to be read once.
    """
    whole = sum(piece.size for piece in pieces)
    wanted = min(max(whole // COUNT, SMALLEST), LARGEST)
    shards: list[Shard] = []
    for together, names in _groups(pieces, made_of):
        known = tuple(name for name in names if name in model.tensors)
        if shards and shards[-1].size < wanted:
            last = shards[-1]
            shards[-1] = Shard(last.number, last.pieces + together, last.tensors + known)
        else:
            shards.append(Shard(len(shards), together, known))
    used = {name for shard in shards for name in shard.tensors}
    rest = [Shard(0, (), (name,)) for name in sorted(model.tensors.keys() - used)]
    return [replace(shard, number=number) for number, shard in enumerate([*shards, *rest])]


def digest(shards: list[Shard]) -> str:
    """Digest of what is to be written where."""
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
        """Plan as torch does, with a proof of the same that takes no time."""
        plans, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata) and not tiling.is_tiled(stored.size, stored.chunks):
                raise ValueError(f"{key}: its pieces are not all of it")
        return plans, metadata

    def resolve_data(self, write_item: WriteItem):
        if write_item.type == WriteItemType.BYTE_IO:
            return self.objects[write_item.index.fqn]
        assert self.values, "a base that is to hold no weights asks for one"
        return self.values.of(self.pieces[write_item.index])


class Writer(FileSystemWriter):
    """Writer of files as torch's, one a shard. It notes their pieces' checksums, and nothing of when and where."""

    def __init__(self, folder: Path):
        # Files are synced beside the work on the next one; nothing is loaded ahead, as tensors are on the CPU.
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _Checksummed()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Work:
    """The making of a checkpoint's files in a folder.

    Without `values` there are none of tensors: the metadata say that their pieces lie in the release.
    """

    def __init__(self, folder: Path, shards: list[Shard], objects: list[ShardedObject], values: Values | None):
        self.folder, self.shards, self.values = folder, shards, values
        self.pool, self.synced = ThreadPoolExecutor(1), []
        kept = {one.unique_key: [one] for one in objects if is_main_replica(one.replica_id)}
        contents = mcore_to_pyt_state_dict(kept)
        plans = [SavePlan([piece.item for piece in shard.pieces]) for shard in shards]
        plans.append(SavePlan([WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in contents]))
        self.planner = Planner(contents, (piece for shard in shards for piece in shard.pieces), values)
        self.writer = Writer(folder)
        plans, self.metadata = self.planner.create_global_plan(plans)
        self.plans = self.writer.prepare_global_plan(plans)

    def is_whole(self, number: int, entry: dict) -> bool:
        """Whether the shard's file is there as it was written."""
        if not self._has_file(number):
            return True
        try:
            with (self.folder / self._name(number)).open("rb") as f:
                places = zip(entry["places"], entry["sums_of_pieces"], strict=True)
                return all(file_sums.of(f, *place) == one for place, one in places)
        except (OSError, LookupError, TypeError, ValueError):  # it is not there, or the entry is of another version
            return False

    def make(self, number: int, model: Model, known: dict[str, str] | None) -> dict:
        """Make a shard, and its entry. `known` are checksums of the released tensors, where they are known."""
        shard = self.shards[number]
        sums = {name: known[name] for name in shard.tensors} if known else _checksums(model, shard.tensors)
        made = self._write(number) | {"sums": sums}
        if self._has_file(number):
            self.synced.append(self.pool.submit(sync, self.folder / self._name(number)))
        self._raise_of_synced()
        return made

    def wait(self) -> None:
        """Wait until the disk has what was written."""
        self.pool.shutdown()
        self._raise_of_synced()

    def _raise_of_synced(self) -> None:
        for one in [one for one in self.synced if one.done()]:
            one.result()
            self.synced.remove(one)

    def finish(self, entries: dict[int, dict]) -> None:
        """Write what is no tensor, and the metadata that lead to every piece. Rank 0 alone does."""
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
    """Have torch write no CRC-32 of a piece, which takes longer than all else of it: a piece has another checksum."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _Checksummed(FileSystem):
    """File system of torch's, with the checksums of the pieces of the last file that was written."""

    sums: dict[int, str]  # by the places where they begin

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
                if summed.error:  # torch says that writing failed, and not why
                    raise summed.error from error
                raise
            summed.end_piece()
            self.sums = summed.sums


def _groups(pieces: list[Piece], made_of: dict[str, list[str]]) -> list[tuple[tuple[Piece, ...], list[str]]]:
    """Pieces that have to stay together, with the released tensors that they are made of."""
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
