"""Callback that marks each checkpoint complete when all ranks have written it, and deletes old ones (checkpoint.keep).

Before that it writes the digests of the trained tensors in memory into the checkpoint: trainer/weights/digests.py.
"""

# pyright: reportOptionalMemberAccess=false

import time
from math import ceil
from pathlib import Path
from typing import Any

from megatron.bridge.training.callbacks import Callback

from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.megatron.recipe import checkpoint_folder
from trainer.serving import agreement
from trainer.startup.console import say
from trainer.training import background_saves, resume
from trainer.training.validations import Validations
from trainer.weights import atomic_folder, digests, file_sums, model_digests
from trainer.weights.exported import peft_format
from trainer.weights.trained import find


class MarkCheckpoints(Callback):
    def __init__(self, run: Run, metrics, validations: Validations | None = None):
        self.run, self.folder, self.metrics, self.validations = run, checkpoint_folder(run), metrics, validations
        self.training = resume.record(run)  # read at the start, so that later edits of the files do not change it

    def on_train_start(self, context) -> None:
        background_saves.begin(self.run.checkpoint.background)

    def on_checkpoint_save(self, context) -> None:
        """Collect the facts about these weights, which the next steps change, for the mark."""
        step, checkpoint = context.state.train_state.step, self.run.checkpoint
        folder = checkpoints.step_folder(self.folder, step)
        of_tensors = model_digests.facts(context, len(agreement.rows(self.run)))
        facts, skips = self._facts(context), self.metrics.skips()
        if self.validations:
            self.validations.after_save(step)
        best = self.validations.best_saved if self.validations and checkpoint.keep_best else None

        def mark(stalled: float, wrote: float) -> None:
            digests.write(folder, of_tensors)
            self._export(step, folder)
            file_sums.write_all(folder, background_saves.sums())
            checkpoints.mark(folder, **facts)
            line = {"kind": "checkpoint", "step": step, "time": time.time(), "folder": str(folder)}
            self.metrics.write(line | {"stalled_seconds": stalled, "writing_seconds": wrote} | skips)
            say(f"step {step}: checkpoint {folder}  stalled {stalled:.2f} s, written in {wrote:.2f} s")
            if checkpoint.keep:
                checkpoints.remove_older(self.folder, checkpoint.keep, best[0] if best else None)

        background_saves.when_written(mark)

    def on_eval_end(self, context) -> None:
        """Mark the last checkpoint again, to record its loss: Bridge validates only after saving it."""
        step = context.state.train_state.step
        if atomic_folder.rank() == 0 and checkpoints.read_mark(checkpoints.step_folder(self.folder, step)):
            checkpoints.mark(checkpoints.step_folder(self.folder, step), **self._facts(context))

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

    def _facts(self, context) -> dict[str, Any]:
        step, samples = context.state.train_state.step, context.state.train_state.consumed_train_samples
        validations = self.validations.facts(step) if self.validations else {}
        return {"step": step, "samples": samples, "training": self.training, **validations}
