"""The places of this installation: a checkout holds the user's files, a wheel leaves them in the current folder."""

import sys
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent
IS_WHEEL = any(CODE.glob("finetune-*.dist-info"))
# prefect.yaml and prefect.toml, which pyproject.toml installs there.
FILES = Path(sys.prefix) / "share" / "finetune" if IS_WHEEL else CODE


def home() -> Path:
    """The folder of runs/, conf/own/ and prefect.own.yaml."""
    return Path.cwd() if IS_WHEEL else CODE
