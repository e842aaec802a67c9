"""Quiet end of a command whose output nobody reads any more, as in `command | head -1`.

    run(main)      # ends the process with the code that main() returns

A command that is still printing ends with the shell's exit code for SIGPIPE. A command that has finished its work keeps
its exit code. The signal is not used, as it would also end a process whose network connection breaks.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TextIO

CODE = 141  # 128 + SIGPIPE


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        if not drop_unread():  # the broken pipe is a network connection
            raise
        sys.exit(CODE)
    finally:
        drop_unread()


def run(main: Callable[[], int | None]) -> NoReturn:
    with quiet():
        sys.exit(main())


def drop(stream: TextIO) -> None:
    """Discard everything that is still written to a stream."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def drop_unread() -> bool:
    """Discard further standard output and error if they have no reader. Return whether one of them has no reader."""
    unread = [stream for stream in (sys.stdout, sys.stderr) if stream and _is_unread(stream)]
    for stream in unread:
        drop(stream)
    return bool(unread)


def _is_unread(stream: TextIO) -> bool:
    try:
        watched = select.poll()
        watched.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in watched.poll(0))
    except (OSError, ValueError):  # not a file, or closed
        return False
