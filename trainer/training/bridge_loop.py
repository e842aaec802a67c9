"""Megatron-Bridge's own training loop, and the ways in which it ends."""

import faulthandler
import logging
import os
import shutil
import threading
from collections.abc import Callable
from typing import Any

from conf.schema.run import Run
from contract import checkpoints
from contract.amounts import size
from contract.faults import WRITER_DIED, Fault, line_of
from trainer.megatron.recipe import checkpoint_folder
from trainer.startup.console import say

CLEANUP_SECONDS = 30  # for process groups to be given up after a failure; they are there within three
END_SECONDS = 90  # until a process that has failed is there no more, whatever it waits for


def train(run: Run, config: Any, forward_step: Any, callbacks: list[Any]) -> None:
    """Train until the last step, or until somebody tells this process to end."""
    from megatron.bridge.training.finetune import finetune

    from trainer.patches.gradients import local_norms
    from trainer.weights.conversion import unwritten
    from trainer.weights.packed_base import loading

    callbacks = [local_norms.install(), *callbacks]
    if run.model.base != "bf16":
        loading.prepare(run)
    elif config.peft or not config.checkpoint.load:  # else the checkpoint has all weights
        unwritten.prepare(run)

    logging.getLogger("megatron.bridge.training.pretrain").addFilter(_is_failure)
    bound_cleanup()
    try:
        finetune(config, forward_step, callbacks=callbacks)
    except SystemExit as leave:  # Bridge's way to end after SIGTERM, once its checkpoint is written
        if leave.code:
            raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        if WRITER_DIED not in str(error):
            raise
        folder = checkpoint_folder(run)
        free = size(shutil.disk_usage(folder).free)
        if os.environ["RANK"] == "0":
            checkpoints.remove_incomplete(folder)
        raise Fault(f"{folder}: a checkpoint could not be written; {free} are free there") from error


def bound_cleanup() -> None:
    """Have a loop that has failed end its process, whatever its cleanup waits for."""
    from megatron.bridge.training import pretrain

    pretrain._cleanup_after_pretrain_failure = bounded(pretrain._cleanup_after_pretrain_failure)


def bounded(cleanup: Callable[..., None]) -> Callable[..., None]:
    """Bridge's cleanup after a failure, which cannot keep the process from ending.

    It aborts NCCL's groups. On GPUs that was seen to wait for ever, so that a training that had failed stayed. What
    has failed is told all the same; the last resort is the interpreter's own watchdog, which waits for no thread.
    """

    def within_bounds(*arguments: Any) -> None:
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
        working = threading.Thread(target=cleanup, args=arguments, name="cleanup after a failure", daemon=True)
        working.start()
        working.join(CLEANUP_SECONDS)
        if working.is_alive():
            say(f"after the failure, process groups were not given up within {CLEANUP_SECONDS} s: it ends without that")
        else:
            faulthandler.cancel_dump_traceback_later()

    return within_bounds


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a log record tells of a failure.

    Bridge logs whatever ends its loop as a failure, with a stack trace: an orderly end and a fault are none.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, SystemExit) or (error and (line_of(error) or WRITER_DIED in str(error))))
