"""Moving mean of the weights (train.ema_decay), which export.weights=ema exports instead of the trained weights.

    mean = d * mean + (1 - d) * weight      after each step; d = min(ema_decay, (1 + step) / (10 + step))

The smaller d of the first steps makes the mean forget the initial weights. Each rank keeps the means of its trained
weights in fp32. A checkpoint holds them in its folder ema, as a second checkpoint with the same sharding: a run can
resume with them at any layout.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateImportUsage=false

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model

from conf.schema.run import Run
from contract import checkpoints
from trainer.megatron.recipe import checkpoint_folder
from trainer.serving import agreement
from trainer.training import background_saves
from trainer.weights import atomic_folder, digests, model_digests

CONFIG = "run_config.yaml"  # of Megatron-Bridge; an export reads the adapter's alpha from it


class WeightMeans(Callback):
    """Means of this rank's trained weights. In the list of callbacks it comes before Parity and MarkCheckpoints."""

    def __init__(self, run: Run, start: int):
        assert run.train.ema_decay is not None
        self.run, self.decay, self.start = run, run.train.ema_decay, start
        self.folder = checkpoint_folder(run)
        self.weights: str | None = None  # digest of the means that were saved last, on rank 0

    @torch.no_grad()
    def on_train_start(self, context) -> None:
        chunks = unwrap_model(context.model)
        self.parameters = [weight for chunk in chunks for weight in chunk.parameters() if weight.requires_grad]
        self.means = [weight.detach().float().clone() for weight in self.parameters]
        folder = checkpoints.step_folder(self.folder, self.start) / checkpoints.MEANS
        if self.start and folder.is_dir():
            self._load(context, folder)

    @torch.no_grad()
    def on_train_step_end(self, context) -> None:
        step = context.state.train_state.step + 1
        decay = min(self.decay, (1 + step) / (10 + step))
        if not context.skipped_iter:
            torch._foreach_lerp_(self.means, [weight.detach().float() for weight in self.parameters], 1 - decay)

    @torch.no_grad()
    def on_checkpoint_save(self, context) -> None:
        step = context.state.train_state.step
        whole = checkpoints.step_folder(self.folder, step)
        folder = whole / checkpoints.MEANS
        if atomic_folder.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        atomic_folder.barrier()
        with self._in_place(self.means):
            dist_checkpointing.save(model_digests.state_of(context.model, context.state.cfg.peft), str(folder))
            facts = model_digests.facts(context, len(agreement.rows(self.run)))
        if atomic_folder.rank() == 0:
            self.weights = digests.of_all(facts["digests"])
            shutil.copyfile(whole / CONFIG, folder / CONFIG)
        background_saves.when_written(lambda stalled, wrote: digests.write(folder, facts))

    def as_weights(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model computes with the means, rounded to its type."""
        return self._in_place([mean.to(weight.dtype) for mean, weight in zip(self.means, self.parameters, strict=True)])

    def _load(self, context, folder: Path) -> None:
        with self._in_place(self.means):
            state = model_digests.state_of(context.model, context.state.cfg.peft)
            states: Any = dist_checkpointing.load(state, str(folder))
            for name, chunk in zip(states, unwrap_model(context.model), strict=True):
                chunk.load_state_dict(states[name], strict=False)

    @contextlib.contextmanager
    def _in_place(self, values: list[torch.Tensor]) -> Iterator[None]:
        """Context in which the model holds these values instead of its weights."""
        weights = [parameter.data for parameter in self.parameters]
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(self.parameters, weights, strict=True):
                parameter.data = value
