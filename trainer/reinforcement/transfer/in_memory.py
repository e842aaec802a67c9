"""Folders in the host's memory, for transfers of weights as files."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from contract.ownership import held
from trainer.startup import full_disk

MEMORY = Path("/dev/shm")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW  # flags for opening a folder
PREFIX = "finetune-rollout-weights-"  # only used here: folders with this name that no process holds are removed


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Yield a folder that is removed afterwards. First remove folders of killed processes: each holds a whole model."""
    for path in MEMORY.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), held(path, FOLDER):
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        while True:
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=PREFIX, dir=MEMORY, ignore_cleanup_errors=True)
            )
            # Until this process holds the folder, another process may remove it as a leftover.
            with contextlib.suppress(OSError):
                stack.enter_context(held(Path(name), FOLDER))
                break
        advice = ", a limit of this host or container; reinforce.transport gloo or ipc does not use it"
        with full_disk.named(MEMORY, advice=advice):
            yield name
