"""Writer of a merged model's files in parts. One rank writes each part and reads it back; parts survive a crash.

A part is a sequence of tensors of one file, of a few hundred megabytes at most, unless a single tensor is larger. The
cut into parts does not depend on the number of ranks. Small weights are made in parallel, large ones one at a time, to
limit memory. Finished parts are recorded with their checksum (trainer/weights/journal.py); a later attempt keeps parts
whose checksum matches.

A format (Merged, or Rounding of as_released.py) determines the contents of the files, and checks what is read back.
"""

# pyright: reportArgumentType=false

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from contract import groups
from contract.faults import Fault
from trainer.startup import device
from trainer.startup.console import say
from trainer.weights import atomic_folder, journal, released, released_tensors, short_writes
from trainer.weights.exported.storing import Storing
from trainer.weights.trained import Trained

READABLE = 0o644  # safetensors makes files readable only by their owner
SIDE_BY_SIDE = 64 * 2**20  # bytes of weights made in parallel
THREADS = 8  # at most
_writing = threading.Lock()  # only one thread at a time can write into a file; others would spin in the kernel


@dataclass(frozen=True)
class Part:
    """Consecutive tensors of a file, and their places."""

    file: str
    rows: dict[str, released.Entry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.rows.values())


@dataclass(frozen=True)
class Layout(Part):
    """All tensors of a file, and its header."""

    header: bytes


@dataclass
class Merged:
    """Contents of the files in the release's types; as_released.py has those in the release's format."""

    trained: Trained
    threads: int = THREADS  # that may request tensors in parallel

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        """Return the tensor to write, in blocks of rows; None if it is copied from the release.

        Each block is invalid after the next is requested.
        """
        blocks = self.trained.blocks(name)
        unpacked = blocks is None and name in self.trained.model.packed
        return [released_tensors.read(self.trained.model, name)] if unpacked else blocks

    def is_right(self, path: Path, name: str, entry: released.Entry, written: str) -> bool:
        """Whether the file, read back, has the correct tensor; `written` is the checksum of what was written.

        A copied tensor must have the checksum that the conversion recorded.
        """
        trained, source = self.trained, self.weight(name)
        if source in trained.values:
            return released.has_sum(path, entry, written)
        if source in trained.adapters:
            return trained.is_merged_in(source, path, entry, written)
        if source in trained.model.packed or (trained.packed and trained.packed.has(source)):
            return released.has_sum(path, entry, written) and trained.is_released(source)
        return released.has_sum(path, entry, trained.sums[name])

    def weight(self, name: str) -> str:
        """Return the weight to which the tensor belongs."""
        return self.trained.copies.get(name, name)

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Return facts to record with these tensors."""
        return self.trained.packed.notes(names) if self.trained.packed else {}


def write(contents: Merged, layouts: list[Layout], folder: Path, journal_folder: Path) -> list[journal.Entry]:
    """Write all files over all ranks, except parts that an earlier attempt recorded. Return the entries."""
    if atomic_folder.rank() == 0:
        for layout in layouts:
            _begin(layout, folder / layout.file)
    atomic_folder.barrier()
    cut, model = dict(enumerate(parts(layouts))), contents.trained.model
    sizes = {number: part.size for number, part in cut.items()}
    size = sum(sizes.values()) + sum(entry.size for entry in model.tensors.values())
    done = 0
    # One more than cores, because one usually waits for the disk.
    with ThreadPoolExecutor(min(contents.threads, device.cores() + 1)) as pool, Storing(size) as storing:

        def is_whole(number: int, entry: journal.Entry) -> bool:
            part = cut[number]
            try:
                found = {name: released.checksum(folder / part.file, row) for name, row in part.rows.items()}
            except (OSError, Fault):  # the file is missing or too short
                return False
            return _sum(found) == entry.get("sum")

        def make(number: int) -> journal.Entry:
            nonlocal done
            part, path = cut[number], folder / cut[number].file
            entry = _make(contents, part, path, pool)
            sources = [model.tensors[name] for name in _released(contents.trained, part)]
            spans = [(model.folder / one.file, one.start, one.size) for one in sources]
            storing.begin((path, min(row.start for row in part.rows.values()), part.size), spans)
            before, done = done, done + 1
            tenths = [10 * count * atomic_folder.ranks() // len(cut) for count in (before, done)]
            if tenths[0] < tenths[1] < 10:
                say(f"export: about {tenths[1]}0 % is written and read back")
            return entry

        def read_ahead(number: int) -> None:
            released.read_ahead(model, _released(contents.trained, cut[number]))

        entries = journal.do(journal_folder, sizes, is_whole, make, ahead=read_ahead)
    contents.trained.stored.seen.update(name for entry in entries.values() for name in entry["seen"])
    return [entries[number] for number in sorted(entries)]


def parts(layouts: list[Layout]) -> list[Part]:
    enough = journal.enough(sum(layout.size for layout in layouts))
    return [
        Part(layout.file, {name: layout.rows[name] for name in names})
        for layout in layouts
        for names in journal.cut({name: entry.size for name, entry in layout.rows.items()}, enough)
    ]


def _begin(layout: Layout, path: Path) -> None:
    """Create the file with its header, in its final length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(layout.header)
        file.truncate(len(layout.header) + layout.size)
    path.chmod(READABLE)


def _make(contents: Merged, part: Part, path: Path, pool: ThreadPoolExecutor) -> journal.Entry:
    """Write a part and check it. Return its journal entry: a checksum, and the trained tensors that it contains."""
    stored, sums, wrong = contents.trained.stored, dict[str, str](), list[str]()
    before = {*stored.seen}
    stored.seen.clear()
    with path.open("r+b", buffering=0) as new:
        for batch in groups.up_to(SIDE_BY_SIDE, ((name, entry.size) for name, entry in part.rows.items())):
            written = pool.map(lambda name: _put(contents, name, part.rows[name], path, new), batch)
            for name, (checksum, is_right) in zip(batch, written, strict=True):
                sums[name] = checksum
                wrong += [] if is_right else [name]
        _require_right(contents, path, wrong)
    seen = sorted(stored.seen)
    stored.seen.update(before)
    return {"sum": _sum(sums), "seen": seen} | contents.notes(part.rows)


def _put(contents: Merged, name: str, entry: released.Entry, path: Path, new: BinaryIO) -> tuple[str, bool]:
    """Write a tensor and read it back at once, while its sources are in the processor's cache.

    Return the checksum of its bytes, and whether it is correct when read back.
    """
    blocks = contents.blocks(name)
    written = _copy(contents.trained.model, name, entry, new) if blocks is None else _write(name, blocks, entry, new)
    del blocks  # free memory before the next tensor
    return written, contents.is_right(path, name, entry, written)


def _write(name: str, blocks: Iterable[torch.Tensor], entry: released.Entry, new: BinaryIO) -> str:
    """Write a tensor. Return its checksum, or "not finite"."""
    found, finite, at, end = xxhash.xxh3_128(), True, entry.start, entry.start + entry.size
    for block in blocks:
        content = released_tensors.as_bytes(block)
        fits = block.shape[1:] == entry.shape[1:] and at + len(content) <= end
        assert fits, f"{name}: {tuple(block.shape)} is not a part of the released {entry.shape}"
        for start in range(0, len(content), released.BLOCK):  # fits into the processor's cache
            some = content[start : start + released.BLOCK]
            found.update(some)
            finite = finite and released.is_finite(some, entry.dtype)
            at += _write_at(new, some, at)
    assert at == end, f"{name}: {end - at} bytes of the released {entry.shape} are missing"
    return found.hexdigest() if finite else "not finite"


def _copy(model: released.Model, name: str, entry: released.Entry, new: BinaryIO) -> str:
    """Copy a released tensor. Return its checksum."""
    found, old, at = xxhash.xxh3_128(), model.tensors[name], entry.start
    for block in released.blocks(model.folder / old.file, old):
        found.update(block)
        at += _write_at(new, block, at)
    return found.hexdigest()


def _write_at(file: BinaryIO, content: memoryview, at: int) -> int:
    """Write at this place while other threads write elsewhere. Return the number of bytes."""
    with _writing:
        short_writes.write_at(file.fileno(), content, at)
    return len(content)


def _sum(sums: dict[str, str]) -> str:
    """Return one checksum of a part, from those of its tensors."""
    return xxhash.xxh3_128_hexdigest("".join(f"{name}={one};" for name, one in sorted(sums.items())).encode())


def _released(trained: Trained, part: Part) -> set[str]:
    """Return the released tensors from which the part is made."""
    model = trained.model
    known = [name for name in part.rows if trained.copies.get(name, name) not in trained.values]
    tensors = {tensor for name in known if name in model.weights for tensor in model.parts(name)}
    return tensors | {name for name in known if name in model.tensors}


def _require_right(contents: Merged, path: Path, wrong: list[str]) -> None:
    edited = [name for name in wrong if not contents.trained.is_released(contents.weight(name))]
    if edited:
        raise Fault(
            f"{contents.trained.model.folder}: {len(edited)} tensors are not those that the base was converted from: "
            f"{released.enumerate_names(edited)}; put the released files back, or convert and train again"
        )
    if wrong:
        raise Fault(f"{path}: read back, {len(wrong)} tensors are wrong: {released.enumerate_names(wrong)}")
