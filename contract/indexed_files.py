"""Files of Megatron's indexed data sets: PREFIX.bin has tokens, PREFIX.idx where each document begins."""

from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from contract import regular_files
from contract.faults import Fault

BIN, IDX = ".bin", ".idx"
HEADER, VERSION = b"MMIDIDX\x00\x00", 1  # of an .idx file


def is_prefix(path: Path) -> bool:
    """Whether both files have this prefix. A folder may have its name too, which megatron-core keeps its cache in."""
    return all(path.with_name(path.name + ending).is_file() for ending in (BIN, IDX)) if path.name else False


def of(path: Path) -> list[Path]:
    """List the files of every data set that a path names: a folder, a prefix or one of the files.

    In a folder only .idx says that there is one: a .bin alone is something else, such as weights.
    """
    if path.is_dir() and not is_prefix(path):
        inside = map(PurePath, regular_files.below(path))
        return both([path / file for file in inside if file.suffix == IDX and not file.name.startswith(".")])
    halves = [path] if path.suffix in (BIN, IDX) else [path.with_name(path.name + ending) for ending in (BIN, IDX)]
    return both([half for half in halves if half.exists()])


def both[File: PurePath](files: Iterable[File], there: Callable[[File], bool] = Path.is_file) -> list[File]:
    """List the two files of each data set that these are of, in the order of the .bin files. Others do not count."""
    prefixes = {file.with_suffix("") for file in files if file.suffix in (BIN, IDX)}
    pairs = sorted((prefix.with_name(prefix.name + BIN), prefix.with_name(prefix.name + IDX)) for prefix in prefixes)
    for pair in pairs:
        for file, other in (pair, pair[::-1]):
            if not there(file):
                raise Fault(f"{other}: of no use without {file.name}, which does not lie beside it")
    return [file for pair in pairs for file in pair]


def are(files: Iterable[PurePath]) -> bool:
    """Whether files are of such data sets."""
    return all(file.suffix in (BIN, IDX) for file in files)
