"""Reader of compressed files, by the ending of their names: gzip, bzip2, xz, zstd, lz4 or none.

    with reading(path) as (stream, position): ...    position() returns the bytes of the compressed file read so far

Archives of several concatenated streams are read completely. Errors of a file become a Fault that names it.
"""

# pyright: reportArgumentType=false

import bz2
import errno
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from conf.schema.row_files import compression
from contract.faults import Fault

BLOCK = 2**18
FOREIGN = {  # first bytes of files whose name has the wrong ending
    b"\x1f\x8b": "gzip; its name has to end in .gz",
    b"BZh": "bzip2; its name has to end in .bz2",
    b"\xfd7zXZ": "xz; its name has to end in .xz",
    b"\x28\xb5\x2f\xfd": "zstd; its name has to end in .zst",
    b"\x04\x22\x4d\x18": "lz4; its name has to end in .lz4",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "Parquet; its name has to end in .parquet",
    b"ARROW1": "Arrow; its name has to end in .arrow",
    b"\xff\xfe": "UTF-16; it has to be UTF-8",
    b"\xfe\xff": "UTF-16; it has to be UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS; fetch the file itself (git lfs pull)",
}
BOM = b"\xef\xbb\xbf"


@contextmanager
def reading(path: Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    with faults(path), path.open("rb") as raw, _opened(raw, compression(path)) as stream:
        yield stream, raw.tell if compression(path) else stream.tell


@contextmanager
def reading_text(path: Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """Open a text without the byte order mark that some editors write."""
    with reading(path) as (stream, position):
        begin = stream.peek(32)[:32]
        if kind := next((kind for magic, kind in FOREIGN.items() if begin.startswith(magic)), None):
            raise Fault(f"{path}: is {kind}")
        if begin.startswith(BOM):
            stream.read(len(BOM))
        yield stream, position


@contextmanager
def faults(path: Path) -> Iterator[None]:
    """Convert errors of reading the file to a Fault that names it."""
    try:
        yield
    except EOFError:
        raise Fault(f"{path}: the compressed file is truncated: fetch it again") from None
    except (zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise Fault(f"{path}: broken as a compressed file ({error}): fetch it again") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = os.strerror(error.errno) if error.errno else (str(error).splitlines() or ["cannot be read"])[0]
        raise Fault(f"{path}: {message}") from None


def _opened(raw: BinaryIO, ending: str) -> io.BufferedReader:
    if not ending:
        return io.BufferedReader(raw, BLOCK)
    if ending in (".gz", ".bz2", ".xz"):
        return io.BufferedReader({".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}[ending](raw), BLOCK)
    import pyarrow as pa  # 50 MB of memory, which files of other kinds do not need

    codec = {".zst": "zstd", ".lz4": "lz4"}[ending]
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec), BLOCK)
