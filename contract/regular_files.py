"""Open and read files at a user's paths. Only regular files are read, as a FIFO or a device may block forever.

Every problem with such a path is a Fault that names it.
"""

import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, NoReturn

from contract.faults import Fault, named

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
LARGEST = 100_000_000  # bytes of a file that is read into memory; safetensors' limit for a header


def open_regular(path: Path) -> BinaryIO:
    """Open a file, or a link to one, for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for the writer of a FIFO
    except FileNotFoundError:
        raise Fault(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        shown = str(path) if str(path).isprintable() else repr(str(path))
        raise Fault(f"{shown}: {getattr(error, 'strerror', None) or error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Fault(f"{path}: {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file")
    return os.fdopen(descriptor, "rb")


def read(path: Path, largest: int = LARGEST) -> bytes:
    """Read a file of at most `largest` bytes."""
    with named(path, OSError), open_regular(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise Fault(f"{path}: larger than {largest} bytes, the limit for such a file")
    return content


def whole(path: str) -> str:
    """Return the path for a configuration: absolute and without `..`. Links are resolved only in a path with `..`."""
    place = Path(path).expanduser().absolute()
    return str(place.resolve() if ".." in place.parts else place)


def is_there(path: Path) -> bool:
    """Whether a file, folder or link has this name. Unlike Path.exists() it never raises, and accepts broken links."""
    try:
        os.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def below(folder: Path) -> list[str]:
    """List all files below a folder, by names relative to it.

    Hidden folders and links to folders are skipped. A folder that cannot be listed is a Fault, as it may contain files.
    """

    def refuse(error: OSError) -> NoReturn:
        raise Fault(f"{error.filename}: {error.strerror}; its content cannot be listed")

    files = list[str]()
    for here, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        files += [Path(here, name).relative_to(folder).as_posix() for name in names]
    return files


def or_meant(path: Path) -> str:
    """Return the end of a message about a missing path: similar names in the same folder, if any."""
    try:
        while not path.parent.is_dir():
            path = path.parent
        near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=2)
    except (OSError, ValueError):
        return ""
    return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
