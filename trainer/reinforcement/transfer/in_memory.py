"""Folders in the host's memory, for transfers of weights as files."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contract.ownership import try_lock
from trainer.startup import full_disk

MEMORY = Path("/dev/shm")
PREFIX = "finetune-rollout-weights-"  # only used here: folders with this name that no process holds are removed


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Yield a folder that is removed afterwards. First remove folders of killed processes: each holds a whole model."""
    for path in MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _held(path):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        while True:
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=PREFIX, dir=MEMORY, ignore_cleanup_errors=True)
            )
            # Until this process holds the folder, another process may remove it as a leftover.
            with contextlib.suppress(OSError):
                stack.enter_context(_held(Path(name)))
                break
        advice = ", a limit of this host or container; reinforce.transport gloo or ipc does not use it"
        with full_disk.named(MEMORY, advice=advice):
            yield name


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a folder, at most until this process ends. Raises an OSError if it is held or does not exist."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not try_lock(descriptor):
            raise BlockingIOError
        os.stat(path)
        yield
    finally:
        os.close(descriptor)
