"""How work ends that cannot be done: by a fault, or by an order to stop.

A fault is of the person who started the work, of the host or of a service. It is one line on stderr and exit code 2,
without a stack trace.
"""

import os
from errno import EACCES, EDQUOT, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS

WRITER_DIED = "Worker failure"  # megatron-core's words; it passes on the kind of the writer's error, not its text
CANNOT_WRITE = (EACCES, EPERM, EROFS)
HOST = (EACCES, EDQUOT, ENOSPC, EROFS, ELOOP, ENAMETOOLONG, ENOTDIR)


class Fault(ValueError):
    """What is wrong, with the value, and what would be right."""


class ConfigError(Fault):
    """Everything that is wrong with a configuration; args are the lines."""

    def __str__(self) -> str:
        return "\n".join(" ".join(line.splitlines()) for line in self.args)


class Stopped(RuntimeError):
    """The flow is being cancelled, or the work is somebody else's by now."""


def line_of(error: BaseException) -> str | None:
    """The line for an error that is no defect of this program; None for one that is.

    A disk that fills up while Megatron saves comes as an error of its own that holds the first one, or only its text.
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
