"""Patch: torchrun's ranks are forks of torchrun, in a process that has imported all that ranks need.

torchrun starts each rank as a new Python, or with multiprocessing, which reports a dead rank only after it has waited
up to 30 s for the others (https://github.com/pytorch/pytorch/blob/main/torch/multiprocessing/spawn.py). With this patch
the rank's command runs in a fork instead; all else stays. Remove when torchrun can start ranks without new imports.

A process that has initialised CUDA cannot be forked. Such a torchrun starts its ranks as usual.
"""

# pyright: reportAttributeAccessIssue=false

import ctypes
import functools
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from trainer.patches import versions

DRIVER = "libcuda.so.1"
NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED


def install() -> None:
    """Make torchrun in this process fork its ranks."""
    versions.check(__name__)
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = functools.partialmethod(_fork, SubprocessHandler._popen)


def has_initialised_cuda() -> bool:
    """Whether this process has initialised CUDA, by the driver's answer.

    The driver's device files may be open without that: torch opens them when it counts GPUs.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALISED


def _fork(handler: Any, usual: Callable, command: tuple[str, ...], environment: dict[str, str]) -> Any:
    """Start a rank. Returns an object with the methods of Popen that torchrun calls."""
    if has_initialised_cuda():
        return usual(handler, command, environment)
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
