"""Locations of this installation: the folder of its local files, and the store of its artifacts."""

import os
from pathlib import Path

from contract.installation import runs_folder
from tasks.store import Store, open_store


def kernels_folder() -> Path:
    """The folder for what serving compiles on this host."""
    return runs_folder() / "kernels"


def open_run_store() -> Store:
    """The store that FINETUNE_STORE names."""
    return open_store(os.environ.get("FINETUNE_STORE") or str(runs_folder() / "store"))
