"""Folders in the host's memory, through which weights go as files."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contract.amounts import size
from contract.faults import Fault, line_of
from contract.ownership import try_lock

MEMORY = Path("/dev/shm")
PREFIX = "finetune-rollout-weights-"  # nobody else's: what has it and is held by none is removed


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
        try:
            yield name
        except Exception as error:  # of a library, which names no place
            if not (line := line_of(error) or "").startswith("disk:"):
                raise
            free = size(shutil.disk_usage(MEMORY).free)
            raise Fault(
                f"{MEMORY}: {line.removeprefix('disk: ')}; {free} are free there, as many as this host or container "
                "gives it; reinforce.transport gloo or ipc needs none of it"
            ) from error


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a folder, at the longest until this process ends. Raises an OSError where it is held or gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not try_lock(descriptor):
            raise BlockingIOError
        os.stat(path)
        yield
    finally:
        os.close(descriptor)
