"""Console output of a trainer command. Only our own lines are printed; Megatron's go to a log file per rank."""

import contextlib
import logging
import os
import sys
from pathlib import Path

from contract import closed_pipe

WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"  # logs errors that it also raises


def say(text: str) -> None:
    """Print one line, on rank 0 only. If the reader has closed the pipe, continue without output."""
    if os.environ.get("RANK", "0") == "0":
        assert sys.__stdout__
        try:
            print(text, file=sys.__stdout__, flush=True)
        except BrokenPipeError:
            closed_pipe.drop(sys.__stdout__)


@contextlib.contextmanager
def megatron_to(folder: Path):
    """Send the output and logs of libraries on this rank to <folder>/rank00000.log. Errors also go to stderr."""
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
