"""Writer of a merged model's files: in parts, each by one rank, read back, and kept when the process dies.

A part is a run of tensors of one file, of a few hundred megabytes at most, unless a single tensor is larger. How files
are cut does not depend on the number of ranks. Small weights are made side by side, a large one by itself, so that
little is in memory. What is finished is noted (trainer/weights/journal.py) with its checksum; a later attempt takes
what has both.

What is in the files, and whether it is right once it is read back, is a format's to say: merged_format.py and
as_released.py.
"""

# pyright: reportArgumentType=false

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import xxhash

from contract.faults import Fault
from trainer.startup import device
from trainer.startup.console import say
from trainer.weights import atomic_folder, journal, released, short_writes
from trainer.weights.exported.storing import Storing
from trainer.weights.released import Entry, enumerate_names
from trainer.weights.trained import Trained

READABLE = 0o644  # safetensors makes files that only their owner can read
LARGEST, SMALLEST = 2**28, 2**20  # bytes of a part
COUNT = 256  # of an export whose parts are between those two
SIDE_BY_SIDE = 64 * 2**20  # bytes of weights that are made at once
THREADS = 8  # at most
_writing = threading.Lock()  # the kernel has one at a time write into a file, and the others spin until they may


@dataclass(frozen=True)
class Layout:
    """A file: its beginning, and the places of its tensors in order."""

    file: str
    header: bytes
    rows: dict[str, Entry]


@dataclass(frozen=True)
class Part:
    """Tensors of a file that lie one after another."""

    file: str
    rows: dict[str, Entry] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.rows.values())


@dataclass(frozen=True)
class Written:
    """A tensor that was written: the checksum of what was, and whether it is there and right, read back."""

    checksum: str
    is_right: bool


class Format(Protocol):
    """Contents of the files of a merged model."""

    @property
    def trained(self) -> Trained: ...

    @property
    def threads(self) -> int:
        """Number of threads that may ask for tensors side by side."""
        ...

    def blocks(self, name: str) -> Iterable[torch.Tensor] | None:
        """The tensor as it has to be written, in blocks of its rows; None for one that is copied as it is.

        Each block is gone when the next is asked for.
        """
        ...

    def is_right(self, path: Path, name: str, entry: Entry, written: str) -> bool:
        """Whether the file, read back, has the tensor that it should: what was written, which has this checksum.

        Of one that was copied, whether it has the checksum that the conversion has recorded.
        """
        ...

    def weight(self, name: str) -> str:
        """The weight that the tensor is of, or is a part of."""
        ...

    def notes(self, names: Iterable[str]) -> dict[str, Any]:
        """Facts to be noted beside these tensors."""
        ...


def write(wanted: Format, layouts: list[Layout], folder: Path, noted: Path) -> list[journal.Entry]:
    """Write all files over all ranks, but for the parts that an earlier attempt has noted. Returns their entries."""
    if atomic_folder.rank() == 0:
        for layout in layouts:
            _begin(layout, folder / layout.file)
    atomic_folder.barrier()
    cut, model = dict(enumerate(parts(layouts))), wanted.trained.model
    sizes = {number: part.size for number, part in cut.items()}
    size = sum(sizes.values()) + sum(entry.size for entry in model.tensors.values())
    done = 0
    # One more than there are cores: a disk is waited for besides.
    with ThreadPoolExecutor(min(wanted.threads, device.cores() + 1)) as pool, Storing(size) as storing:

        def is_whole(number: int, entry: journal.Entry) -> bool:
            part = cut[number]
            found = {name: _checksum(folder / part.file, row) for name, row in part.rows.items()}
            return _sum(found) == entry.get("sum")

        def make(number: int) -> journal.Entry:
            nonlocal done
            part, path = cut[number], folder / cut[number].file
            entry = _make(wanted, part, path, pool)
            sources = [model.tensors[name] for name in _released(wanted.trained, part)]
            spans = [(model.folder / one.file, one.start, one.size) for one in sources]
            storing.begin((path, min(row.start for row in part.rows.values()), part.size), spans)
            before, done = done, done + 1
            tenths = [10 * count * atomic_folder.ranks() // len(cut) for count in (before, done)]
            if tenths[0] < tenths[1] < 10:
                say(f"export: about {tenths[1]}0 % are written and read back")
            return entry

        entries = journal.do(noted, sizes, is_whole, make, lambda number: _read_ahead(wanted.trained, cut[number]))
    wanted.trained.stored.seen.update(name for entry in entries.values() for name in entry["seen"])
    return [entries[number] for number in sorted(entries)]


def parts(layouts: list[Layout]) -> list[Part]:
    whole = sum(entry.size for layout in layouts for entry in layout.rows.values())
    enough, found = min(max(whole // COUNT, SMALLEST), LARGEST), []
    for layout in layouts:
        found.append(Part(layout.file))
        end = len(layout.header)
        for name, entry in layout.rows.items():
            assert entry.start == end, f"{layout.file}: {name} does not follow the tensor before it"
            if found[-1].size >= enough:
                found.append(Part(layout.file))
            found[-1].rows[name] = entry
            end += entry.size
    return found


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _begin(layout: Layout, path: Path) -> None:
    """Make the file with its beginning, as long as it is going to be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(layout.header)
        file.truncate(len(layout.header) + sum(entry.size for entry in layout.rows.values()))
    path.chmod(READABLE)


def _make(wanted: Format, part: Part, path: Path, pool: ThreadPoolExecutor) -> journal.Entry:
    """Write a part and check it. Returns its entry: a checksum, and the trained tensors that were read for it."""
    stored, found = wanted.trained.stored, dict[str, Written]()
    before = {*stored.seen}
    stored.seen.clear()
    with path.open("r+b", buffering=0) as new:
        for batch in _batches(part.rows):
            made = pool.map(lambda name: _put(wanted, name, part.rows[name], path, new), batch)
            found |= zip(batch, made, strict=True)
        _require_right(wanted, path, [name for name, one in found.items() if not one.is_right])
    seen = sorted(stored.seen)
    stored.seen.update(before)
    sums = {name: one.checksum for name, one in found.items()}
    return {"sum": _sum(sums), "seen": seen} | wanted.notes(part.rows)


def _put(wanted: Format, name: str, entry: Entry, path: Path, new: BinaryIO) -> Written:
    """Write a tensor and read it back at once, while a processor has at hand what it is made of."""
    blocks = wanted.blocks(name)
    written = _copy(wanted.trained.model, name, entry, new) if blocks is None else _write(name, blocks, entry, new)
    del blocks  # before another one's are made
    return Written(written, wanted.is_right(path, name, entry, written))


def _write(name: str, blocks: Iterable[torch.Tensor], entry: Entry, new: BinaryIO) -> str:
    """Write a tensor. Returns its checksum, or that it is not finite."""
    found, finite, at, end = xxhash.xxh3_128(), True, entry.start, entry.start + entry.size
    for block in blocks:
        content = as_bytes(block)
        fits = block.shape[1:] == entry.shape[1:] and at + len(content) <= end
        assert fits, f"{name}: {tuple(block.shape)} is no part of the released {entry.shape}"
        for start in range(0, len(content), released.BLOCK):  # which stays near the processor
            some = content[start : start + released.BLOCK]
            found.update(some)
            finite = finite and released.is_finite(some, entry.dtype)
            at += _write_at(new, some, at)
    assert at == end, f"{name}: {end - at} bytes of the released {entry.shape} are missing"
    return found.hexdigest() if finite else "not finite"


def _copy(model: released.Model, name: str, entry: Entry, new: BinaryIO) -> str:
    """Write a tensor as it was released. Returns its checksum."""
    found, old, at = xxhash.xxh3_128(), model.tensors[name], entry.start
    with (model.folder / old.file).open("rb") as file:
        for block in released.blocks(file, old):
            found.update(block)
            at += _write_at(new, block, at)
    return found.hexdigest()


def _write_at(file: BinaryIO, content: memoryview, at: int) -> int:
    """Write at this place, whatever other threads write elsewhere. Returns how many bytes there are."""
    with _writing:
        short_writes.write_at(file.fileno(), content, at)
    return len(content)


def _sum(sums: dict[str, str]) -> str:
    """One checksum of a part, of those of its tensors."""
    return xxhash.xxh3_128_hexdigest("".join(f"{name}={one};" for name, one in sorted(sums.items())).encode())


def _read_ahead(trained: Trained, part: Part) -> None:
    """Have the kernel read what the part is made of, as far as it is the release's."""
    released.read_ahead(trained.model, _released(trained, part))


def _released(trained: Trained, part: Part) -> set[str]:
    """The released tensors that the part is made of."""
    model = trained.model
    known = [name for name in part.rows if trained.copies.get(name, name) not in trained.values]
    tensors = {tensor for name in known if name in model.weights for tensor in model.parts(name)}
    return tensors | {name for name in known if name in model.tensors}


def _require_right(wanted: Format, path: Path, wrong: list[str]) -> None:
    edited = [name for name in wrong if not is_released(wanted.trained, wanted.weight(name))]
    if edited:
        raise Fault(
            f"{wanted.trained.model.folder}: {len(edited)} tensors are not those that the base was converted from: "
            f"{enumerate_names(edited)}; put the released files back, or convert and train again"
        )
    if wrong:
        raise Fault(f"{path}: read back, {len(wrong)} tensors are wrong: {enumerate_names(wrong)}")


def is_released(trained: Trained, name: str) -> bool:
    """Whether the release still holds the weight that the base was made from."""
    model = trained.model
    entries = {part: model.tensors[part] for part in model.parts(name)}
    return all(
        released.has_sum(model.folder / entry.file, entry, trained.sums[part]) for part, entry in entries.items()
    )


def holds(path: Path, entry: Entry, written: str) -> bool:
    """Whether what was written at this place of the file, which has this checksum, lies there."""
    return _checksum(path, entry) == written


def _checksum(path: Path, entry: Entry) -> str:
    """Checksum of what lies in the file at this place; none where it is not there, or ends early."""
    try:
        return released.checksum(path, entry)
    except (OSError, Fault):
        return ""


def _batches(rows: dict[str, Entry]) -> Iterator[list[str]]:
    """Cut weights into groups that fit into memory together, however large one of them is."""
    batch, size = [], 0
    for name, entry in rows.items():
        if batch and size + entry.size > SIDE_BY_SIDE:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += entry.size
    yield batch
