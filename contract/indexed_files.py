"""Files of Megatron's indexed data sets: PREFIX.bin has the tokens, PREFIX.idx the start of each document."""

from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from contract import regular_files
from contract.faults import Fault

BIN, IDX = ".bin", ".idx"
HEADER, VERSION = b"MMIDIDX\x00\x00", 1  # of an .idx file


def is_prefix(path: Path) -> bool:
    """Whether both files have this prefix. A folder may have the same name, for megatron-core's cache."""
    return all(path.with_name(path.name + ending).is_file() for ending in (BIN, IDX)) if path.name else False


def of(path: Path) -> list[Path]:
    """List the files of every data set at a path: a folder, a prefix or one of the files.

    In a folder only an .idx file counts: a .bin without one is something else, such as weights.
    """
    if path.is_dir() and not is_prefix(path):
        inside = map(PurePath, regular_files.below(path))
        return both([path / file for file in inside if file.suffix == IDX and not file.name.startswith(".")])
    halves = [path] if path.suffix in (BIN, IDX) else [path.with_name(path.name + ending) for ending in (BIN, IDX)]
    return both([half for half in halves if half.exists()])


def both[File: PurePath](files: Iterable[File], exists: Callable[[File], bool] = Path.is_file) -> list[File]:
    """List both files of each data set that these files belong to, in the order of the .bin files."""
    prefixes = {file.with_suffix("") for file in files if file.suffix in (BIN, IDX)}
    pairs = sorted((prefix.with_name(prefix.name + BIN), prefix.with_name(prefix.name + IDX)) for prefix in prefixes)
    for pair in pairs:
        for file, other in (pair, pair[::-1]):
            if not exists(file):
                raise Fault(f"{other}: cannot be used without {file.name}, which is not in the same folder")
    return [file for pair in pairs for file in pair]


def are(files: Iterable[PurePath]) -> bool:
    """Whether all these files belong to indexed data sets."""
    return all(file.suffix in (BIN, IDX) for file in files)
