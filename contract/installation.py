"""The places of this installation: a checkout holds the user's files, a wheel leaves them in the current folder."""

import os
import sys
from pathlib import Path

from contract.faults import Fault

CODE = Path(__file__).resolve().parent.parent
IS_WHEEL = any(CODE.glob("finetune-*.dist-info"))
# prefect.yaml and prefect.toml, which pyproject.toml installs there.
FILES = Path(sys.prefix) / "share" / "finetune" if IS_WHEEL else CODE


def home() -> Path:
    """The folder of runs/, conf/own/ and prefect.own.yaml."""
    return Path.cwd() if IS_WHEEL else CODE


def runs_folder() -> Path:
    """The folder of all local files: runs/ of the checkout, or FINETUNE_RUNS, in which ~ may be unexpanded."""
    try:
        return Path(os.environ.get("FINETUNE_RUNS") or home() / "runs").expanduser().absolute()
    except RuntimeError:
        raise Fault(f"FINETUNE_RUNS: {os.environ['FINETUNE_RUNS']}: no such home folder; write the full path") from None
