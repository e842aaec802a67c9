"""State of validations during training: which checkpoint is the best so far, and whether training ends early.

A checkpoint's mark has the state: loss (of its step, if it was validated), lowest (so far) and worse (validations since
then). A run that resumes from it continues these counts. Each validation takes the next rows: two validations see the
same rows only if train.validate_batches cover all rows for validation.
"""

# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false

from typing import Any

from megatron.bridge.training.callbacks import Callback

from conf.schema.run import Run
from contract import checkpoints
from trainer.megatron.recipe import checkpoint_folder
from trainer.startup.console import say
from trainer.training.metrics import Metrics, highest


class Validations(Callback):
    """State of a run's validations. In the list of callbacks it is after Metrics, and before its users."""

    def __init__(self, run: Run, metrics: Metrics, start: int):
        self.run, self.metrics, self.folder = run, metrics, checkpoint_folder(run)
        mark = checkpoints.read_mark(checkpoints.step_folder(self.folder, start)) or {}
        before = mark.get("validations", {})
        self.lowest: float | None = before.get("lowest")
        self.worse: int = before.get("worse", 0)
        self.last: tuple[int, float] | None = None  # the last step that was validated, and its loss
        self.best_saved = checkpoints.best(self.folder)  # step and loss

    def facts(self, step: int) -> dict[str, Any]:
        """The state at a step, for the mark of its checkpoint; empty if the run has no validations."""
        if self.lowest is None:
            return {}
        return {"validations": {"loss": self._loss(step), "lowest": self.lowest, "worse": self.worse}}

    def on_eval_end(self, context) -> None:
        step = context.state.train_state.step
        if self.last and self.last[0] == step:
            return  # Bridge's last validation repeats a validated step
        (loss,) = highest(self.metrics.validation_loss)  # all ranks must end at the same step
        self.last = step, loss
        self.worse = self.worse + 1 if self.lowest is not None and self.last[1] >= self.lowest else 0
        self.lowest = self.last[1] if self.lowest is None else min(self.lowest, self.last[1])
        patience, settings = self.run.train.stop_after_worse, context.state.cfg.train
        if patience is not None and self.worse >= patience and step < settings.train_iters:
            say(f"step {step}: {self.worse} validations in a row above {self.lowest:.4f}: training ends here")
            settings.train_iters = step

    def is_best(self, step: int) -> bool:
        """Whether the checkpoint that is being saved is the best so far and has to be kept."""
        loss = self._loss(step)
        if not self.run.checkpoint.keep_best or loss is None:
            return False
        return self.best_saved is None or loss < self.best_saved[1]

    def after_save(self, step: int) -> None:
        """Remember the checkpoint if it is the best so far."""
        loss = self._loss(step)
        if self.is_best(step) and loss is not None:
            self.best_saved = step, loss

    def _loss(self, step: int) -> float | None:
        return self.last[1] if self.last and self.last[0] == step else None
