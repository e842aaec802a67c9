"""Megatron-Bridge's own training loop, and the ways in which it ends."""

import logging
import os
import shutil
from typing import Any

from conf.schema.run import Run
from contract import checkpoints
from contract.amounts import size
from contract.faults import WRITER_DIED, Fault, line_of
from trainer.megatron.recipe import checkpoint_folder


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


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a log record tells of a failure.

    Bridge logs whatever ends its loop as a failure, with a stack trace: an orderly end and a fault are none.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, SystemExit) or (error and (line_of(error) or WRITER_DIED in str(error))))
