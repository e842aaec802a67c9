"""Callback that marks each checkpoint complete once Megatron has written all of it.

Before that it writes the digests of the trained tensors in memory into the checkpoint: trainer/weights/digests.py.
"""

# pyright: reportOptionalMemberAccess=false

import time
from math import ceil
from pathlib import Path

from megatron.bridge.training.callbacks import Callback

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron.recipe import checkpoint_folder
from trainer.serving import agreement
from trainer.startup.console import say
from trainer.training import resume
from trainer.training.validations import Validations
from trainer.weights import atomic_folder, model_digests
from trainer.weights.exported import peft_format
from trainer.weights.trained import find


class MarkCheckpoints(Callback):
    def __init__(self, run: Run, metrics, validations: Validations | None = None):
        self.run, self.folder, self.metrics, self.validations = run, checkpoint_folder(run), metrics, validations
        self.training = resume.record(run)  # read at the start, so that later edits of the files do not change it

    def on_checkpoint_save(self, context) -> None:
        """Mark the checkpoint. Bridge calls this on every rank after all ranks have written and passed a barrier."""
        step = context.state.train_state.step
        folder = checkpoints.step_folder(self.folder, step)
        model_digests.write(folder, context, len(agreement.rows(self.run)))
        if atomic_folder.rank() == 0:
            self._export(step, folder)
            self._mark(context)
            line = {"kind": "checkpoint", "step": step, "time": time.time(), "folder": str(folder)}
            self.metrics.write(line | self.metrics.skips())
            say(f"step {step}: checkpoint {folder}")
        if self.validations:
            self.validations.after_save(step)

    def on_eval_end(self, context) -> None:
        """Mark the last checkpoint again, to record its loss: Bridge validates only after saving it."""
        step = context.state.train_state.step
        if atomic_folder.rank() == 0 and checkpoints.read_mark(checkpoints.step_folder(self.folder, step)):
            self._mark(context)

    def _export(self, step: int, folder: Path) -> None:
        """Write the adapter into every n-th checkpoint. If PEFT cannot express it, log that and continue.

        The last checkpoint, and a checkpoint saved after SIGTERM, may lie within an interval. They get the number of
        the checkpoint at the interval's end.
        """
        interval, every = self.run.checkpoint.save_every, self.run.export.every
        assert isinstance(interval, int)  # steps: trainer.train has a resolved schedule
        if every is None or ceil(step / interval) % every:
            return
        try:
            trained = find(self.run, folder)
            peft_format.check(trained)
            peft_format.write(trained, folder / "adapter", str(self.run.model.source))
        except Fault as fault:
            say(f"train: {folder}: the adapter of this checkpoint was not written: {fault}")

    def _mark(self, context) -> None:
        step, samples = context.state.train_state.step, context.state.train_state.consumed_train_samples
        validations = self.validations.facts(step) if self.validations else {}
        folder = checkpoints.step_folder(self.folder, step)
        checkpoints.mark(folder, step=step, samples=samples, training=self.training, **validations)
