"""A new folder that appears only when it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.faults import Fault


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` at the end, or removed if the block raises."""
    folder = Path(os.path.realpath(folder))  # follow links
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise Fault(f"{folder} exists and is not an empty folder")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)  # replaces an empty folder and refuses any other
    except BaseException:
        shutil.rmtree(partial)
        raise
