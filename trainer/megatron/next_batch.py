"""Read the next step's batch while the GPU computes the current step.

Megatron-Bridge's loop reads a batch at the beginning of a step, and the GPU waits for it. Here the batch is read as
soon as all passes of the previous step are queued on the GPU. This requires a constant batch size, because the sampler
runs early. data.workers reads further ahead, in processes that need cores.
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
        self.source: Iterator[Any] | None = None  # iterator of this step's batch
        self.prefetched: tuple[Iterator[Any], Any] | None = None

    def on_train_start(self, context: Any) -> None:
        config = get_model_config(context.model[0])
        config.finalize_model_grads_func = self.after(config.finalize_model_grads_func)
        batch_utils.prepare_finetuning_batch = self.from_prefetched(batch_utils.prepare_finetuning_batch)

    def after(self, finalize: Callable[..., None]) -> Callable[..., None]:
        """Wrap the end of a step's passes: read one more batch after all passes are queued."""

        @functools.wraps(finalize)
        def finalize_and_read(*args: Any, **kwargs: Any) -> None:
            finalize(*args, **kwargs)
            if self.source is None or get_rerun_state_machine().get_mode() != RerunMode.DISABLED:
                return
            batches, self.source = self.source, None
            try:
                self.prefetched = batches, next(batches)
            except StopIteration:  # raised again by the next step, if one follows
                self.prefetched = None

        return finalize_and_read

    def from_prefetched(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that gives Bridge the micro batches of a step, in training or validation."""

        @functools.wraps(prepare)
        def prepare_finetuning_batch(data_iterator: Iterator[Any] | None, *args: Any, **kwargs: Any) -> Any:
            self.source = data_iterator
            if self.prefetched is not None and self.prefetched[0] is data_iterator:
                data_iterator, self.prefetched = iter([self.prefetched[1]]), None
            return prepare(data_iterator, *args, **kwargs)

        return prepare_finetuning_batch
