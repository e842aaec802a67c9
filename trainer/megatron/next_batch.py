"""The batch of the next step is read while the GPU computes this one.

Megatron-Bridge's loop asks for a batch when a step begins, and the GPU waits for it. Here it is read as soon as all
passes of a step have been handed to the GPU. It is for batches of one size, as the sampler is asked early. data.workers
reads further ahead, in processes that take cores.
"""

# pyright: reportAttributeAccessIssue=false

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.bridge.data import batch_utils
from megatron.bridge.training.callbacks import Callback
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import get_model_config

from conf.schema.run import Run
from trainer.startup import device


def helps(run: Run) -> bool:
    return device.has_gpu() and not run.data.workers and not run.train.batch_ramp


class NextBatch(Callback):
    def __init__(self) -> None:
        self.asked: Iterator[Any] | None = None  # which iterator this step's batch came from
        self.read: tuple[Iterator[Any], Any] | None = None

    def on_train_start(self, context: Any) -> None:
        config = get_model_config(context.model[0])
        config.finalize_model_grads_func = self.after(config.finalize_model_grads_func)
        batch_utils.prepare_finetuning_batch = self.given(batch_utils.prepare_finetuning_batch)

    def after(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """The end of a step's passes, which reads one batch more once all of them have been started."""

        @functools.wraps(finalize)
        def finalize_and_read(*given: Any, **named: Any) -> None:
            finalize(*given, **named)
            if self.asked is None or get_rerun_state_machine().get_mode() != RerunMode.DISABLED:
                return
            batches, self.asked = self.asked, None
            try:
                self.read = batches, next(batches)
            except StopIteration:  # it is met again, if there is another step
                self.read = None

        return finalize_and_read

    def given(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Bridge's way to the micro batches of a step, of training or of a validation."""

        @functools.wraps(prepare)
        def prepare_finetuning_batch(data_iterator: Iterator[Any] | None, *given: Any, **named: Any) -> Any:
            self.asked = data_iterator
            if self.read is not None and self.read[0] is data_iterator:
                data_iterator, self.read = iter([self.read[1]]), None
            return prepare(data_iterator, *given, **named)

        return prepare_finetuning_batch
