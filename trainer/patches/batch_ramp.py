"""Patch for growing batches: pass megatron-core the schedule; Megatron-Bridge passes an obsolete setting.

Bridge (https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/initialize.py) passes
rampup_batch_size, which core 0.19 ignores with a warning (megatron/core/num_microbatches_calculator.py), so every batch
has the full size. Bridge also saves a checkpoint whenever batches grow, even if it has just saved this step. Remove
when Bridge passes step_batch_size_schedule.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from trainer.patches import versions


def install(schedule: str) -> None:
    """Give core a schedule such as "0:8 64:16": 8 sequences per step, and 16 from the 64th sequence on."""
    versions.check(__name__)
    from megatron.bridge.training import initialize, train
    from megatron.core import num_microbatches_calculator

    init_calculator = num_microbatches_calculator.init_num_microbatches_calculator
    initialize.init_num_microbatches_calculator = partial(init_calculator, step_batch_size_schedule=schedule)
    if not isinstance(train.save_checkpoint_and_time, OnceAStep):
        train.save_checkpoint_and_time = OnceAStep(train.save_checkpoint_and_time)


class OnceAStep:
    """Save function that skips a step it has already saved."""

    def __init__(self, save: Callable[..., Any]):
        self.save, self.saved = save, -1

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        if state.train_state.step == self.saved:
            return None
        self.saved = state.train_state.step
        return self.save(state, *args, **kwargs)
