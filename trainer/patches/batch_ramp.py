"""Patch for batches that grow: megatron-core takes a schedule of them, and Megatron-Bridge passes a former setting.

Bridge (https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/initialize.py) passes
rampup_batch_size, which core 0.19 ignores but for a warning (megatron/core/num_microbatches_calculator.py): every batch
is a whole one. Bridge saves a checkpoint whenever batches grow, also at a step that it has just saved. The patch can go
when Bridge passes step_batch_size_schedule.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.patches import versions

WRITTEN_FOR = {"megatron-bridge": ("0.6.2",), "megatron-core": ("0.19.2",)}


def install(schedule: str) -> None:
    """Have core take a schedule, such as "0:8 64:16": 8 sequences a step, and from the 64th one on 16."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.bridge.training import initialize, train
    from megatron.core import num_microbatches_calculator

    made = num_microbatches_calculator.init_num_microbatches_calculator
    initialize.init_num_microbatches_calculator = partial(made, step_batch_size_schedule=schedule)
    if not isinstance(train.save_checkpoint_and_time, OnceAStep):
        train.save_checkpoint_and_time = OnceAStep(train.save_checkpoint_and_time)


class OnceAStep:
    """A way to save that does nothing at a step that it has saved."""

    def __init__(self, save: Callable[..., Any]):
        self.save, self.saved = save, -1

    def __call__(self, state: Any, *given: Any, **named: Any) -> Any:
        if state.train_state.step == self.saved:
            return None
        self.saved = state.train_state.step
        return self.save(state, *given, **named)
