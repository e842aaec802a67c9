"""Run Megatron-Bridge's training loop, and handle its end: success, SIGTERM, or a failure."""

import faulthandler
import logging
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

CLEANUP_SECONDS = 30  # limit for destroying the process groups after a failure; it normally takes less than three
END_SECONDS = 90  # limit after which a failed process is ended, whatever it waits for


def train(run: Run, config: Any, forward_step: Any, callbacks: list[Any]) -> None:
    """Train until the last step, or until this process receives SIGTERM."""
    from megatron.bridge.training.finetune import finetune

    from trainer.patches import resharding
    from trainer.patches.checkpoints import divided_states
    from trainer.patches.gradients import local_norms
    from trainer.training import background_saves
    from trainer.weights.conversion import unwritten
    from trainer.weights.packed_base import loading

    resharding.install()
    divided_states.install()
    callbacks = [local_norms.install(), *callbacks]
    if run.model.base != "bf16":
        loading.prepare(run)
    elif config.peft or not config.checkpoint.load:  # else the checkpoint has all weights
        unwritten.prepare(run)

    logging.getLogger("megatron.bridge.training.pretrain").addFilter(_is_failure)
    bound_cleanup()
    try:
        finetune(config, forward_step, callbacks=callbacks)
    except SystemExit as exit_request:  # Bridge raises it after SIGTERM, when its checkpoint is written
        if exit_request.code:
            raise
    except BaseException as error:  # torch's CheckpointException does not inherit from Exception
        # a rank that has not seen the failed save yet fails when it waits for one that has
        if WRITER_DIED not in str(background_saves.failure() or error):
            raise
        folder = checkpoint_folder(run)
        free = size(shutil.disk_usage(folder).free)
        checkpoints.remove_incomplete(folder)  # by each rank: torchrun ends the others when the first one has ended
        raise Fault(f"{folder}: a checkpoint could not be written; {free} are free there") from error


def bound_cleanup() -> None:
    """Make a failed loop end its process even if Bridge's cleanup hangs."""
    from megatron.bridge.training import pretrain

    pretrain._cleanup_after_pretrain_failure = bounded(pretrain._cleanup_after_pretrain_failure)


def bounded(cleanup: Callable[..., None]) -> Callable[..., None]:
    """Wrap Bridge's cleanup after a failure in a time limit, because it can hang.

    It aborts NCCL's groups. On GPUs this sometimes waited for ever, and the failed process never ended. With the limit
    the process ends and the failure is still reported. The last resort is Python's faulthandler, which exits the
    process without waiting for any thread.
    """

    def with_time_limit(*arguments: Any) -> None:
        faulthandler.dump_traceback_later(END_SECONDS, exit=True)
        thread = threading.Thread(target=cleanup, args=arguments, name="cleanup after a failure", daemon=True)
        thread.start()
        thread.join(CLEANUP_SECONDS)
        if thread.is_alive():
            say(f"process groups were not destroyed within {CLEANUP_SECONDS} s after the failure: the process ends now")
        else:
            faulthandler.cancel_dump_traceback_later()

    return with_time_limit


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a log record reports a real failure.

    Bridge logs every end of its loop as a failure with a stack trace, even an orderly exit and a Fault. Other code
    reports these two in one line.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, SystemExit) or (error and (line_of(error) or WRITER_DIED in str(error))))
