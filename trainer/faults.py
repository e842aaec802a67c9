"""A fault of the person who started the command, or of the host: one line on stderr, exit code 2, no stack trace."""

import os
from errno import EACCES, EDQUOT, ELOOP, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS

from conf.faults import Fault
from conf.output_marks import Foreign

__all__ = ["WRITER_DIED", "Fault", "line_of"]

WRITER_DIED = "Worker failure"  # megatron-core's words; it passes on the kind of the writer's error, not its text
CANNOT_WRITE = (EACCES, EPERM, EROFS)
HOST = (EACCES, EDQUOT, ENOSPC, EROFS, ELOOP, ENAMETOOLONG, ENOTDIR)


def line_of(error: BaseException) -> str | None:
    """The line for an error that is no defect of this program; None for one that is.

    A disk that fills up while Megatron saves comes as an error of its own that holds the first one, or only its text.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Fault | Foreign):
            return str(seen)
        if isinstance(seen, OSError) and seen.errno in HOST:
            return f"{seen.filename or 'disk'}: {os.strerror(seen.errno)}"
        seen = seen.__cause__ or seen.__context__
    text = str(error)
    if WRITER_DIED in text and "OSError" in text:
        return "disk: a checkpoint could not be written"
    full = os.strerror(ENOSPC)
    return f"disk: {full}" if full in text else None
