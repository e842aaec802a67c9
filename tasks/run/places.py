"""Locations of this installation: the folder of its local files, and the store of its artifacts."""

import os
from pathlib import Path

from contract.faults import Fault
from contract.installation import home
from tasks.store import Store, open_store


def runs_folder() -> Path:
    """The folder of all local files: runs/ of the checkout, or FINETUNE_RUNS, in which ~ may be unexpanded."""
    try:
        return Path(os.environ.get("FINETUNE_RUNS") or home() / "runs").expanduser().absolute()
    except RuntimeError:
        raise Fault(f"FINETUNE_RUNS: {os.environ['FINETUNE_RUNS']}: no such home folder; write the full path") from None


def kernels_folder() -> Path:
    """The folder for what serving compiles on this host."""
    return runs_folder() / "kernels"


def open_run_store() -> Store:
    """The store that FINETUNE_STORE names."""
    return open_store(os.environ.get("FINETUNE_STORE") or str(runs_folder() / "store"))
