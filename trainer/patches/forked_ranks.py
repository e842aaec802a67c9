"""Patch: torchrun's ranks are forks of torchrun, in a process that has imported all that ranks need.

torchrun starts each rank as a new Python, or with multiprocessing, which reports a dead rank only after it has waited
up to 30 s for the others (https://github.com/pytorch/pytorch/blob/main/torch/multiprocessing/spawn.py). With this patch
the rank's command runs in a fork instead; all else stays. Remove when torchrun can start ranks without new imports.
"""

# pyright: reportAttributeAccessIssue=false

import multiprocessing
import os
import runpy
import sys
from typing import Any

from trainer.patches import versions


def install() -> None:
    """Make torchrun in this process fork its ranks. This process must not have used a GPU."""
    versions.check(__name__)
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = _fork


def _fork(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
    """Start a rank. Returns an object with the methods of Popen that torchrun calls."""
    files = [file.fileno() for file in (handler._stdout, handler._stderr)]
    rank = multiprocessing.get_context("fork").Process(target=_rank, args=(command, environment, files))
    rank.start()
    return rank._popen


def _rank(command: tuple[str, ...], environment: dict[str, str], files: list[int]) -> None:
    os.setsid()  # torchrun signals the group
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    module = command.index("-m") + 1
    sys.argv = [*command[module:]]
    runpy.run_module(command[module], run_name="__main__", alter_sys=True)
