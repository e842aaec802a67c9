"""Checkpoints that a thread of each rank writes while training continues (checkpoint.background).

At the end of a step each rank copies its part of the checkpoint into host memory (trainer/training/host_copies.py). Its
thread writes the copies. Then the threads of all ranks meet in a gloo group that only they use. Rank 0's thread writes
the metadata and calls the functions of when_written(); the last one marks the checkpoint complete. At most one save is
in flight: the next one waits for it, and so do SIGTERM, the end of training, and a rank whose training fails. An error
of one rank's thread is raised on all ranks, before the next step or save.

A thread is enough: Python's lock is free while torch and the kernel write. It ends with its process, and a folder
without a mark remains.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.utils import _get_failure_dict

from trainer.patches.checkpoints import background, divided_states
from trainer.training.host_copies import HostCopies, return_freed_memory
from trainer.weights import file_sums

Written = Callable[[float, float], None]
Result = tuple[Any, dict[str, str]]  # of a writer: megatron-core's, and the checksums of its files by their paths
FAILING_SECONDS = 30  # limit for the save in flight of a rank whose training failed; another rank may be dead


class Saves:
    """Saves of this rank; at most one is in flight."""

    def __init__(self, in_background: bool):
        self.in_background, self.copies = in_background, HostCopies()
        self.group = distributed.new_group(backend="gloo")
        self.parts: list[tuple[Any, Any]] = []  # megatron-core's writers, and on rank 0 their metadata
        self.functions: list[Written] = []
        self.sums: dict[str, str] = {}  # on rank 0: checksums of the files of all ranks
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.stalled = 0.0

    def save(self, usual: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call Bridge's function, which calls take() for each writer, and let a thread write the files."""
        started = time.monotonic()
        self.wait()
        self.copies.begin()
        self.parts, self.functions = [], []
        usual(*args, **kwargs)
        if not self.parts:  # this step is already saved
            return
        torch.cuda.synchronize()
        self.stalled = time.monotonic() - started
        self.thread = threading.Thread(target=self._write, name="save", daemon=True)
        self.thread.start()
        if not self.in_background:
            self.wait()

    def take(self, writer: Any, metadata: Any) -> None:
        """Copy the tensors of a writer whose files are planned, if they are on a GPU."""
        for index, (path, name, (objects, tensors)) in enumerate(writer.write_buckets):
            copied = [(item, self.copies.copy(one) if one.is_cuda else one) for item, one in tensors]
            writer.write_buckets[index] = path, name, (objects, copied)
        self.parts.append((writer, metadata))

    def check(self) -> None:
        """Raise the error of a save that has ended."""
        if self.thread and not self.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error."""
        self.end(None)
        if self.error:
            raise self.error

    def end(self, within: float | None = FAILING_SECONDS) -> None:
        """Wait for the save in flight at most this many seconds."""
        if self.thread:
            self.thread.join(within)

    def _write(self) -> None:
        started = time.monotonic()
        try:
            of_ranks = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
            distributed.gather_object([_files(writer) for writer, _ in self.parts], of_ranks, group=self.group)
            outcome = [self._complete(of_ranks, started) if of_ranks else None]
            distributed.broadcast_object_list(outcome, group=self.group)
            self.error = outcome[0]
        except BaseException as error:  # another rank is dead
            self.error = error

    def _complete(self, of_ranks: list[Any], started: float) -> BaseException | None:
        try:
            self.sums = {}
            for (writer, metadata), of_writer in zip(self.parts, zip(*of_ranks, strict=True), strict=True):
                results = [result for result, _ in of_writer]
                if failures := _get_failure_dict(results):
                    return CheckpointException("write", failures)
                writer.finish(metadata, results)
                self.sums |= {path: value for _, of_files in of_writer for path, value in of_files.items()}
            for function in self.functions:
                wrote = time.monotonic() - started
                function(self.stalled + (0 if self.in_background else wrote), wrote)
        except BaseException as error:
            return error
        return None


_saves: Saves | None = None


def begin(in_background: bool) -> None:
    """Save by threads from now on. All ranks must call it."""
    global _saves
    return_freed_memory()  # of loading
    _saves = Saves(in_background)
    background.install(_saves)
    divided_states.install(partial(_saves.copies.copy, dtype=torch.float32))


def when_written(function: Written) -> None:
    """Have rank 0 call the function when all ranks have written the checkpoint that is being saved.

    Its arguments are the seconds for which training stood still, and those of writing.
    """
    assert _saves is not None
    _saves.functions.append(function)


def sums() -> dict[str, str]:
    """Checksums of the files that all ranks have written, by their paths; for a function of when_written()."""
    assert _saves is not None
    return _saves.sums


def failure() -> BaseException | None:
    """Return the error of the last save, if it failed."""
    return _saves.error if _saves else None


def _files(writer: Any) -> Result:
    """Write the files of a writer. Return its results or its error, as megatron-core's writer does."""
    try:
        write, _, arguments = writer.get_save_function_and_args()
        if write:
            write(*arguments)
        paths = [str(path) for path, *_ in writer.write_buckets]
        return writer.retrieve_write_results(), {path: file_sums.of(Path(path)) for path in paths}
    except BaseException as error:
        return _wrap_exception(error), {}
