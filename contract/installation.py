"""Places of this installation: a checkout contains the user's files; with a wheel they are in the current folder."""

import os
import sys
from pathlib import Path

from contract.faults import Fault

CODE = Path(__file__).resolve().parent.parent
IS_WHEEL = any(CODE.glob("finetune-*.dist-info"))
# Folder of prefect.yaml and prefect.toml, as pyproject.toml installs them.
FILES = Path(sys.prefix) / "share" / "finetune" if IS_WHEEL else CODE


def home() -> Path:
    """Return the folder of runs/, conf/own/ and prefect.own.yaml."""
    return Path.cwd() if IS_WHEEL else CODE


def runs_folder() -> Path:
    """Return the folder of all local files: FINETUNE_RUNS, in which ~ is expanded, or runs/ of home()."""
    try:
        return Path(os.environ.get("FINETUNE_RUNS") or home() / "runs").expanduser().absolute()
    except RuntimeError:
        raise Fault(f"FINETUNE_RUNS: {os.environ['FINETUNE_RUNS']}: no such home folder; write the full path") from None
