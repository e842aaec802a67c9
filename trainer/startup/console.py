"""Console output of a trainer command: our own lines. Megatron's go to a log per rank, for when they matter."""

import contextlib
import logging
import os
import sys
from pathlib import Path

from contract import closed_pipe

WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"  # what ends it is raised as well, and told once


def say(text: str) -> None:
    """Print one line, from rank 0. Where nobody reads any more, the work goes on without a word."""
    if os.environ.get("RANK", "0") == "0":
        assert sys.__stdout__
        try:
            print(text, file=sys.__stdout__, flush=True)
        except BrokenPipeError:
            closed_pipe.drop(sys.__stdout__)


@contextlib.contextmanager
def megatron_to(folder: Path):
    """Send what libraries print, warn and log on this rank to <folder>/rank00000.log. Errors still reach stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{int(os.environ['RANK']):05d}.log"
    root = logging.getLogger()
    before = root.handlers[:]
    with path.open("a", buffering=1) as log, contextlib.redirect_stdout(log):
        errors = logging.StreamHandler(sys.__stderr__)
        errors.setLevel(logging.ERROR)
        errors.addFilter(lambda record: record.name != WRITER)
        root.handlers = [logging.StreamHandler(log), errors]
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.handlers = before
