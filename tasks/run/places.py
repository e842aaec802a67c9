"""Locations of this installation: the folder of its local files, and the store of its artifacts."""

import os
from pathlib import Path

from contract.installation import runs_folder
from tasks.store import Store, open_store


def kernels_folder() -> Path:
    """Return the folder for kernels that serving compiles on this host."""
    return runs_folder() / "kernels"


def open_run_store() -> Store:
    """Return the store that FINETUNE_STORE names, or the folder `store` in the folder of runs."""
    return open_store(os.environ.get("FINETUNE_STORE") or str(runs_folder() / "store"))
