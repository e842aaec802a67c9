"""Atomic writes of files: a file is written under a temporary name, then renamed.

A write that is not durable survives the death of its process. A durable write also survives a power failure: the
content is on the disk before the rename, and the new name before the call returns. docs/adr/0015-durable-writes.md has
the list of durable writes and the reasons.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# Name of a temporary file, which a killed process may leave. It contains only the beginning of a long name.
_PARTIAL = re.compile(r"\..{1,50}\.[0-9a-f]{8}\.partial", re.DOTALL)


def write_atomically(path: str | os.PathLike[str], data: bytes | str, *, durable: bool) -> None:
    """Write a file. After any error it has its complete old or its complete new content."""
    with open_atomically(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str], *, durable: bool) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without an error.

    The mode of a replaced file is kept. Errors of the operating system name `path`.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with open(partial, "xb") as file:
                yield file
                with contextlib.suppress(FileNotFoundError):
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        if durable:
            sync(path.parent)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial), partial):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_partial(name: str) -> bool:
    """Whether this is the name of an unfinished file."""
    return _PARTIAL.fullmatch(name) is not None


def last_lines(path: Path, size: int) -> list[str]:
    """Lines in the last `size` bytes of a file that may still grow; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def sync(path: Path) -> None:
    """Flush a file's content, or the names of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
