"""Names of files with rows. The flow uses them to check folders and object stores, preparation to read files.

In a folder all files with a known ending are rows, also in its subfolders, ordered by their names. Hidden files, index
files and the descriptions that `datasets` writes are not rows. A .txt next to files of other formats is not either, as
it is a README or a licence.
"""

import glob
import stat
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath

from contract import indexed_files, regular_files
from contract.faults import Fault

TEXT = ".txt"
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", TEXT, ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
ENDINGS = f"{', '.join(FORMATS)}, or one of these and {', '.join(COMPRESSED)}; tokens in .bin and .idx"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def compression(name: str | PurePath) -> str:
    """The ending of a compressed file; "" for an uncompressed one."""
    ending = PurePath(name).suffix.lower()
    return ending if ending in COMPRESSED else ""


def format_of(name: str | PurePath) -> str:
    """The ending with the file's format, without its compression; "" for a file without rows."""
    path = PurePath(name)
    ending = (path.with_suffix("") if compression(path) else path).suffix.lower()
    return ending if ending in FORMATS else ""


def only_texts(names: Iterable[str | PurePath]) -> bool:
    """Whether all of these files are .txt, as megatron-core writes such files next to tokens in its cache."""
    return all(format_of(name) == TEXT for name in names)


def files(source: str) -> list[Path]:
    """List the files that a source names: a folder, a file, a pattern, or a data set of Megatron's .bin and .idx."""
    path = Path(source).expanduser()
    if path.is_dir() and not indexed_files.is_prefix(path):
        paths = inside(path)
        paths = (only_texts(paths) and indexed_files.of(path)) or paths
        if not paths:
            raise Fault(f"{source}: no file in this folder ends in one of {ENDINGS}")
        return paths
    if path.exists() and not path.is_file() and not path.is_dir():
        raise Fault(f"{source}: neither a file nor a folder")
    if paths := indexed_files.of(path):
        return paths
    if path.exists():
        if not format_of(path):
            raise Fault(f"{source}: ends in none of {ENDINGS}")
        return [path]
    if not glob.has_magic(source):
        raise Fault(f"{source}: no such file or folder")
    matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    paths = [match for match in matches if format_of(match) and match.is_file()]
    paths = paths or indexed_files.both(matches)
    if not paths:
        problem = f"matches no file that ends in one of {ENDINGS}" if matches else "matches no file"
        raise Fault(f"{source}: {problem}")
    return paths


def inside(folder: Path) -> list[Path]:
    """List the files of a folder on this host that are read, in their order."""
    files = list[Path]()
    for file in (folder / name for name in among(regular_files.below(folder))):
        try:
            mode = file.stat().st_mode
        except FileNotFoundError:
            if file.is_symlink():
                raise Fault(f"{file}: a link to {file.readlink()}, which does not exist") from None
            continue  # it was just removed
        except OSError as error:
            raise Fault(f"{file}: {error.strerror}") from None
        files += [file] if stat.S_ISREG(mode) else []
    return files


def among(names: Iterable[str]) -> list[str]:
    """Select the files of a folder that are read, in their order. Names are relative to the folder, with slashes."""
    paths = sorted(PurePosixPath(name) for name in names)
    files = [
        path
        for path in paths
        if format_of(path)
        and not any(part.startswith(".") for part in path.parts)
        and ".idx" not in path.suffixes
        and path.name not in DESCRIPTIONS
    ]
    return [str(path) for path in [path for path in files if format_of(path) != TEXT] or files]
