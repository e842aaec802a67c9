"""Open and read files that a caller has named. Only regular ones are read, as a FIFO or a device may block for ever.

Whatever is wrong with such a path is a Fault that names it.
"""

import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, NoReturn

from contract.faults import Fault

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
LARGEST = 100_000_000  # bytes read whole; the safetensors library allows that many for a header


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a link to one counts."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # of a FIFO this does not wait
    except FileNotFoundError:
        raise Fault(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        shown = str(path) if str(path).isprintable() else repr(str(path))
        raise Fault(f"{shown}: {getattr(error, 'strerror', None) or error}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise Fault(f"{path}: {KINDS.get(stat.S_IFMT(mode), 'something else')}, and no file")
    return os.fdopen(descriptor, "rb")


def read(path: Path, largest: int = LARGEST) -> bytes:
    """Read a whole file of at most so many bytes."""
    with open_regular(path) as file:
        try:
            found = file.read(largest + 1)
        except OSError as error:
            raise Fault(f"{path}: {error.strerror}") from None
    if len(found) > largest:
        raise Fault(f"{path}: larger than {largest} bytes, the most that is read of such a file")
    return found


def whole(path: str) -> str:
    """The path as a configuration keeps it: absolute and without `..`. Links stay, except before a `..`."""
    place = Path(path).expanduser().absolute()
    return str(place.resolve() if ".." in place.parts else place)


def is_there(path: Path) -> bool:
    """Whether anything has this name, a broken link included. Unlike Path.exists() this raises for no name."""
    try:
        os.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def below(folder: Path) -> list[str]:
    """List all that lies in a folder and in folders within it, and is no folder itself, by names relative to it.

    Hidden folders and links to folders are left out. What cannot be listed is a Fault: files may be missed there.
    """

    def refuse(error: OSError) -> NoReturn:
        raise Fault(f"{error.filename}: {error.strerror}; what lies in it cannot be seen")

    found = list[str]()
    for here, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(here, name).relative_to(folder).as_posix() for name in names]
    return found


def or_meant(path: Path) -> str:
    """The end of a line about a path that is not there: what lies beside it under a like name, if anything."""
    try:
        while not path.parent.is_dir():
            path = path.parent
        near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=2)
    except (OSError, ValueError):
        return ""
    return f"; did you mean {' or '.join(str(path.parent / name) for name in near)}?" if near else ""
