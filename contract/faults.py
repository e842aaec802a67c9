"""Exceptions for work that cannot be done: a Fault, or an order to stop.

A Fault is a problem of the user's input, of the host or of a service. It is shown as one line on stderr with exit code
2, without a stack trace.
"""

from __future__ import annotations  # flows/doctor.py runs on Python 3.8

import contextlib
import os
from collections.abc import Iterator
from errno import EACCES, EDQUOT, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS

WRITER_DIED = "Worker failure"  # megatron-core's message, with the type but without the text of the writer's error
CANNOT_WRITE = (EACCES, EPERM, EROFS)
HOST = (EACCES, EDQUOT, ENOSPC, EROFS, ELOOP, ENAMETOOLONG, ENOTDIR)


class Fault(ValueError):
    """A problem that the user can fix. The message has the problem, the value, and a remedy."""


class ConfigError(Fault):
    """All problems of a configuration; args are the lines."""

    def __str__(self) -> str:
        return "\n".join(" ".join(line.splitlines()) for line in self.args)


class Broken(RuntimeError):
    """A failed command without a known user error."""


class Stopped(RuntimeError):
    """An order to stop: the flow is being cancelled, or another process has taken over the work."""


@contextlib.contextmanager
def named(name: object, kinds: type[Exception] | tuple[type[Exception], ...] = Fault) -> Iterator[None]:
    """Turn each error of these kinds into a Fault whose message begins with the name."""
    try:
        yield
    except kinds as error:
        raise Fault(f"{name}: {getattr(error, 'strerror', None) or error}") from None


def line_of(error: BaseException) -> str | None:
    """Return the line to show for an error that is not a defect of this program; None for a defect.

    If a disk fills up during a save, Megatron raises another error, which contains the original error or only its text.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Fault):
            return str(seen)
        if isinstance(seen, OSError) and seen.errno in HOST:
            return f"{seen.filename or 'disk'}: {os.strerror(seen.errno)}"
        seen = seen.__cause__ or seen.__context__
    text = str(error)
    if WRITER_DIED in text and "OSError" in text:
        return "disk: a checkpoint could not be written"
    full = os.strerror(ENOSPC)
    return f"disk: {full}" if full in text else None
