"""Folders in the host's memory, through which weights go as files."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

MEMORY, PREFIX = Path("/dev/shm"), "rollout-"


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Give a folder that goes afterwards. What a process that was killed has left, goes before: it is a whole model."""
    for path in MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _held(path):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        while True:
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=PREFIX, dir=MEMORY, ignore_cleanup_errors=True)
            )
            # Another process may have taken it for one that was left, until it is held.
            with contextlib.suppress(OSError):
                stack.enter_context(_held(Path(name)))
                break
        yield name


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a folder, at the longest until this process ends. Raises an OSError where it is held or gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
        yield
    finally:
        os.close(descriptor)
