"""Name the folder in the error of a full disk, which names none."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from contract.amounts import size
from contract.faults import Fault, line_of


@contextlib.contextmanager
def named(*folders: Path, advice: str = "") -> Iterator[None]:
    """Add the folder with the least free space to the error of a full disk, and the advice."""
    try:
        yield
    except Exception as error:
        line = line_of(error) or ""
        if not line.startswith("disk:"):
            raise
        existing = [next(p for p in (path.absolute(), *path.absolute().parents) if p.exists()) for path in folders]
        free, folder = min((shutil.disk_usage(place).free, str(place)) for place in existing)
        raise Fault(f"{folder}: {line.removeprefix('disk: ')}; {size(free)} are free there{advice}") from error
