"""Files that are whole or not there: written beside their place, then renamed.

A write that is not durable survives the death of its process. One that is durable survives a power cut as well: the
content is on the disk before the name leads to it, and so is the name before the call returns.
docs/adr/0015-durable-writes.md says which are durable and why.
"""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# What a process that was killed may leave beside a file; the name is short, so that a long one can be written as well.
_PARTIAL = re.compile(r"\..{1,50}\.[0-9a-f]{8}\.partial", re.DOTALL)


def write_atomically(path: str | os.PathLike[str], data: bytes | str, *, durable: bool) -> None:
    """Give a file this content. Whatever goes wrong, it holds all of the new content or what it held before."""
    with open_atomically(path, durable=durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def open_atomically(path: str | os.PathLike[str], *, durable: bool) -> Iterator[BinaryIO]:
    """Open a file that gets its name, and replaces an older one, when the block ends without an error.

    A file that is replaced hands on its mode. An error of the operating system names `path`.
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
    """Whether a file has the name of one that was being written."""
    return _PARTIAL.fullmatch(name) is not None


def sync(path: Path) -> None:
    """Put a file's content, whoever wrote it, or the names of a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
