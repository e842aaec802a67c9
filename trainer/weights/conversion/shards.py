"""Shards of a checkpoint: files of a few hundred megabytes. One process writes each; finished files survive a crash.

The model alone determines how tensors are cut into shards, so any number of processes writes the same files. A finished
shard has an entry in a journal next to the files: the place and checksum of each piece, and the checksums of the
released tensors from which it was made. A later attempt keeps shards whose entry and checksums are valid.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from contract import checksums
from contract.files import sync, write_atomically
from trainer.weights import file_sums, journal, released, torch_dist
from trainer.weights.conversion import tiling
from trainer.weights.conversion.megatron_tensors import Piece, Values
from trainer.weights.conversion.summed_stream import SummedStream


@dataclass(frozen=True)
class Shard:
    number: int
    pieces: tuple[Piece, ...]
    tensors: tuple[str, ...]  # released tensors; each belongs to one shard


def cut(pieces: list[Piece], made_of: dict[str, list[str]], model: released.Model) -> list[Shard]:
    """Cut the pieces into shards, in order. Everything made from one released tensor is in one shard.

    `made_of` has the released tensors of each parameter. Unused released tensors get shards without pieces, to be read
    once.
    """
    groups = _groups(pieces, made_of)
    sizes = {number: sum(piece.size for piece in together) for number, (together, _) in enumerate(groups)}
    contents: list[tuple[list[Piece], list[str]]] = []
    for numbers in journal.cut(sizes, journal.enough(sum(sizes.values()))):
        names = [name for number in numbers for name in groups[number][1] if name in model.tensors]
        contents.append(([piece for number in numbers for piece in groups[number][0]], names))
    used = {name for _, names in contents for name in names}
    contents += [([], [name]) for name in sorted(model.tensors.keys() - used)]
    return [Shard(number, tuple(some), tuple(names)) for number, (some, names) in enumerate(contents)]


def digest(shards: list[Shard]) -> str:
    """Return the digest of contents and places of all shards."""
    lines = [
        [shard.number, [[repr(piece.item), piece.name, piece.start] for piece in shard.pieces], shard.tensors]
        for shard in shards
    ]
    return checksums.of(json.dumps(lines))


class Work:
    """Writer of a checkpoint's files into a folder.

    Without `values` no files of tensors are written: the metadata point to the release.
    """

    def __init__(self, folder: Path, shards: list[Shard], objects: list[ShardedObject], values: Values | None):
        self.folder, self.shards, self.values = folder, shards, values
        self.pool, self.synced = ThreadPoolExecutor(1), []
        self.objects = mcore_to_pyt_state_dict(
            {item.unique_key: [item] for item in objects if is_main_replica(item.replica_id)}
        )
        plans = [SavePlan([piece.item for piece in shard.pieces]) for shard in shards]
        plans.append(SavePlan([WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.objects]))
        self.plans, self.metadata = create_default_global_save_plan(plans)
        self.pieces = {piece.item.index: piece for shard in shards for piece in shard.pieces}
        for key, stored in self.metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata) and not tiling.is_tiled(stored.size, stored.chunks):
                raise ValueError(f"{key}: its pieces do not cover it")

    def is_whole(self, number: int, entry: dict) -> bool:
        """Whether the shard's file is unchanged since it was written."""
        if not self._has_file(number):
            return True
        path = self.folder / self._name(number)
        try:
            places = zip(entry["places"], entry["sums_of_pieces"], strict=True)
            return all(file_sums.of(path, *place) == one for place, one in places)
        except (OSError, LookupError, TypeError, ValueError):  # no file, or an entry of another version
            return False

    def make(self, number: int, model: released.Model, known: dict[str, str] | None) -> dict:
        """Write a shard, and return its entry. `known` are checksums of the released tensors, or None."""
        shard = self.shards[number]
        sums = {name: known[name] for name in shard.tensors} if known else _checksums(model, shard.tensors)
        entry = self._write(number) | {"sums": sums}
        if self._has_file(number):
            self.synced.append(self.pool.submit(sync, self.folder / self._name(number)))
        return entry

    def wait(self) -> None:
        """Wait until the disk has all written files."""
        self.pool.shutdown()
        for future in self.synced:
            future.result()

    def finish(self, entries: dict[int, dict]) -> None:
        """Write the objects, and the metadata of all pieces. Only rank 0 calls this."""
        last = len(self.shards)
        every = dict(sorted((entries | {last: self._write(last)}).items()))
        places, sums = {}, dict[str, str]()
        for number, entry in every.items():
            name = self._name(number)
            for item, (offset, length) in zip(self.plans[number].items, entry["places"], strict=True):
                places[item.index] = _StorageInfo(name, offset, length)
            of_pieces = zip(entry["places"], entry.get("sums_of_pieces", []), strict=False)
            sums |= {file_sums.name(name, offset): one for (offset, _), one in of_pieces}
        file_sums.write(self.folder, sums)
        # The current time and the path would make each base different.
        metadata = replace(self.metadata, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
        write_atomically(self.folder / ".metadata", pickle.dumps(metadata), durable=False)

    def _write(self, number: int) -> dict:
        """Write the file of a shard, or of all objects. Return the places and checksums of its pieces."""
        items, places = self.plans[number].items, []
        if not self._has_file(number):
            return {"places": [[0, 0] for _ in items]}
        with (self.folder / self._name(number)).open("wb") as file:
            stream = SummedStream(file)
            for item in items:
                start = stream.tell()
                if item.type == WriteItemType.BYTE_IO:
                    stream.write(self.objects[item.index.fqn].getbuffer())
                else:
                    stream.save(self.values.of(self.pieces[item.index]))
                places.append([start, stream.tell() - start])
        if self.values:
            self.values.forget()
        return {"places": places, "sums_of_pieces": [stream.sums[start] for start, _ in places]}

    def _has_file(self, number: int) -> bool:
        return bool(self.plans[number].items) and (self.values is not None or number == len(self.shards))

    def _name(self, number: int) -> str:
        return f"__{number}_0.distcp" if self._has_file(number) else torch_dist.RELEASED


def _groups(pieces: list[Piece], made_of: dict[str, list[str]]) -> list[tuple[list[Piece], list[str]]]:
    """Return groups of pieces that must stay together, with the released tensors of each group."""
    of_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        of_parameter.setdefault(piece.name, []).append(piece)
    groups: list[tuple[list[Piece], list[str]]] = []
    where: dict[str, int] = {}
    for name, together in of_parameter.items():
        number = next((where[one] for one in made_of[name] if one in where), len(groups))
        if number == len(groups):
            groups.append(([], []))
        groups[number][0].extend(together)
        for one in made_of[name]:
            if one not in where:
                where[one] = number
                groups[number][1].append(one)
    return groups


def _checksums(model: released.Model, names: tuple[str, ...]) -> dict[str, str]:
    sums, infinite = released.checksums(model, names)
    if infinite:
        raise released.not_finite(model, infinite)
    return sums
