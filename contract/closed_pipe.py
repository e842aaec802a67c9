"""End of a command whose output nobody reads any more, as behind `| head -1`: quiet, whatever was still to be printed.

    with quiet():
        sys.exit(main())

A command that prints ends with the exit code that a shell gives for SIGPIPE. One that has done its work keeps its own
code. The signal itself would also end a process whose network connection breaks.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import TextIO

CODE = 141  # 128 + SIGPIPE


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        if not drop_unread():  # it is of a connection
            raise
        sys.exit(CODE)
    finally:
        drop_unread()


def drop(stream: TextIO) -> None:
    """Send what is still written to a stream to nobody."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def drop_unread() -> bool:
    """Send what is still written to standard output and error to nobody, where nobody reads it. Returns whether so."""
    gone = [stream for stream in (sys.stdout, sys.stderr) if stream and _is_unread(stream)]
    for stream in gone:
        drop(stream)
    return bool(gone)


def _is_unread(stream: TextIO) -> bool:
    try:
        watched = select.poll()
        watched.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in watched.poll(0))
    except (OSError, ValueError):  # it is no file, or closed
        return False
