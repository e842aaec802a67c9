"""What a process imports that prepares rows made by hand: multiprocessing's fork server imports this module once."""

import tempfile
from pathlib import Path

from tests.support import small_model
from trainer.data import preparation  # noqa: F401
from trainer.data.tokens import tokenizer

with tempfile.TemporaryDirectory() as _folder:
    small_model.write(Path(_folder) / "model")
    tokenizer.load(Path(_folder) / "model", trust_remote_code=False)
