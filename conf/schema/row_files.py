"""Names of files that hold rows. The flow checks folders and object stores by them, preparation the files it reads.

In a folder all files with a known ending are rows, those in folders within it too, in the order of their names. Hidden
files, index files and the descriptions that `datasets` leaves beside its files are not rows. A .txt beside files of
other kinds is none either, as it is a README or a licence there.
"""

import stat
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath

from contract import regular_files
from contract.faults import Fault

TEXT = ".txt"
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", TEXT, ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
ENDINGS = f"{', '.join(FORMATS)}, or one of these and {', '.join(COMPRESSED)}; tokens in .bin and .idx"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def compression(name: str | PurePath) -> str:
    """The ending that says how a file is compressed; "" where it is not."""
    ending = PurePath(name).suffix.lower()
    return ending if ending in COMPRESSED else ""


def format_of(name: str | PurePath) -> str:
    """The ending that says what the file is, without its compression; "" for a file that holds no rows."""
    path = PurePath(name)
    ending = (path.with_suffix("") if compression(path) else path).suffix.lower()
    return ending if ending in FORMATS else ""


def only_texts(names: Iterable[str | PurePath]) -> bool:
    """Whether these files, if any, are .txt, as those are that megatron-core leaves beside tokens in its cache."""
    return all(format_of(name) == TEXT for name in names)


def inside(folder: Path) -> list[Path]:
    """List the files of a folder on this host that are read, in their order."""
    found = list[Path]()
    for file in (folder / name for name in among(regular_files.below(folder))):
        try:
            mode = file.stat().st_mode
        except FileNotFoundError:
            if file.is_symlink():
                raise Fault(f"{file}: a link to {file.readlink()}, which is not there") from None
            continue  # removed this moment
        except OSError as error:
            raise Fault(f"{file}: {error.strerror}") from None
        found += [file] if stat.S_ISREG(mode) else []
    return found


def among(names: Iterable[str]) -> list[str]:
    """Select the files of a folder that are read, in their order. Names are relative to the folder, with slashes."""
    paths = sorted(PurePosixPath(name) for name in names)
    found = [
        path
        for path in paths
        if format_of(path)
        and not any(part.startswith(".") for part in path.parts)
        and ".idx" not in path.suffixes
        and path.name not in DESCRIPTIONS
    ]
    return [str(path) for path in [path for path in found if format_of(path) != TEXT] or found]
