"""Which files hold rows, by their names: the flow asks it of folders and object stores, preparation of what it reads.

Of a folder all files with a known ending are rows, those in folders within it too, in the order of their names. Hidden
ones, index files and the descriptions that `datasets` leaves beside its files are not; nor is .txt beside files of
other kinds, where it is a README or a licence.
"""

from collections.abc import Iterable
from pathlib import PurePath, PurePosixPath

TEXT = ".txt"
FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", TEXT, ".parquet", ".arrow", ".feather")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
ENDINGS = f"{', '.join(FORMATS)}, or one of these and {', '.join(COMPRESSED)}"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def compression(name: str | PurePath) -> str:
    """The ending that says how a file is compressed, or nothing."""
    ending = PurePath(name).suffix.lower()
    return ending if ending in COMPRESSED else ""


def format_of(name: str | PurePath) -> str:
    """The ending that says what the file is, compression aside; nothing for what holds no rows."""
    path = PurePath(name)
    ending = (path.with_suffix("") if compression(path) else path).suffix.lower()
    return ending if ending in FORMATS else ""


def among(names: Iterable[str]) -> list[str]:
    """Of all that lies in a folder what is read, in its order; names are relative to the folder, with slashes."""
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
