"""Callback that marks each checkpoint complete once Megatron has written all of it.

The digests of the trained tensors, as they are in memory, are written beside it first: trainer/weights/digests.py.
"""

# pyright: reportOptionalMemberAccess=false

import time
from math import ceil
from pathlib import Path

from megatron.bridge.training.callbacks import Callback
from torch import distributed

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron.recipe import checkpoint_folder
from trainer.serving import agreement
from trainer.startup.console import say
from trainer.training import resume
from trainer.training.validations import Validations
from trainer.weights import digests, model_digests
from trainer.weights.exported import peft_format
from trainer.weights.trained import find


def is_nth(step: int, interval: int, every: int | None) -> bool:
    """Whether every n-th checkpoint is that of this step. They are counted from the first step of the whole training.

    The last one may lie between two intervals, and one that SIGTERM has saved as well: each counts as the next.
    """
    return every is not None and ceil(step / interval) % every == 0


class Saves(Callback):
    def __init__(self, run: Run, metrics, validations: Validations | None = None):
        self.run, self.folder, self.metrics, self.validations = run, checkpoint_folder(run), metrics, validations
        self.training = resume.record(run)  # as it is now: nobody is to edit it under a running training

    def on_checkpoint_save(self, context) -> None:
        """Mark the checkpoint. Every rank gets this call after all have written and passed a barrier."""
        of_tensors = model_digests.of_model(context.model, context.state.cfg.peft)
        alpha = model_digests.alpha(context.model)
        if distributed.get_rank() == 0:
            step = context.state.train_state.step
            folder = checkpoints.step_folder(self.folder, step)
            facts = {"step": step, "alpha": alpha, "prompts": len(agreement.rows(self.run)), "digests": of_tensors}
            digests.write(folder, facts)
            self._export(step, folder)
            self._mark(context)
            line = {"kind": "checkpoint", "step": step, "time": time.time(), "folder": str(folder)}
            self.metrics.write(line | self.metrics.skips())
            say(f"step {step}: checkpoint {folder}")
        if self.validations:
            self.validations.after_save(context.state.train_state.step)

    def on_eval_end(self, context) -> None:
        """Mark the last checkpoint again, which Bridge validates after it has been saved."""
        step = context.state.train_state.step
        if distributed.get_rank() == 0 and checkpoints.read_mark(checkpoints.step_folder(self.folder, step)):
            self._mark(context)

    def _export(self, step: int, folder: Path) -> None:
        """Write the adapter beside every n-th checkpoint. One that PEFT cannot express ends no training."""
        interval = self.run.checkpoint.save_every
        assert isinstance(interval, int)  # steps: trainer.train has a resolved schedule
        if not is_nth(step, interval, self.run.export.every):
            return
        try:
            trained = find(self.run, folder)
            peft_format.check(trained)
            peft_format.write(trained, folder / "adapter", str(self.run.model.source))
        except Fault as fault:
            say(f"train: {folder}: its adapter was not written: {fault}")

    def _mark(self, context) -> None:
        step, samples = context.state.train_state.step, context.state.train_state.consumed_train_samples
        seen = self.validations.facts(step) if self.validations else {}
        folder = checkpoints.step_folder(self.folder, step)
        checkpoints.mark(folder, step=step, samples=samples, training=self.training, **seen)
