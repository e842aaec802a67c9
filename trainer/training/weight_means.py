"""Moving mean of the weights (train.ema_decay): another model beside the trained one, for export.weights=ema.

    mean = d * mean + (1 - d) * weight      behind each step; d = min(ema_decay, (1 + step) / (10 + step))

The smaller d of the first steps has the mean forget what it began with. Each rank keeps the means of the weights that
it trains, in fp32. A checkpoint holds them as one of their own, in its folder ema, cut like the weights: a run goes on
with them at any layout.
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
from torch import distributed

from conf.schema.run import Run
from contract import checkpoints
from trainer.megatron.recipe import checkpoint_folder
from trainer.serving import agreement
from trainer.weights import digests, model_digests

CONFIG = "run_config.yaml"  # Megatron-Bridge's, which an export reads the adapter's alpha from


class WeightMeans(Callback):
    """Means of all trained weights of this rank. It stands before Parity and Saves in the list of callbacks."""

    def __init__(self, run: Run, start: int):
        assert run.train.ema_decay is not None
        self.run, self.decay, self.start = run, run.train.ema_decay, start
        self.folder = checkpoint_folder(run)
        self.weights: str | None = None  # digest of the means that were saved last, on rank 0

    @torch.no_grad()
    def on_train_start(self, context) -> None:
        chunks = unwrap_model(context.model)
        self.parameters = [one for chunk in chunks for one in chunk.parameters() if one.requires_grad]
        self.means = [one.detach().float().clone() for one in self.parameters]
        folder = checkpoints.step_folder(self.folder, self.start) / checkpoints.MEANS
        if self.start and folder.is_dir():
            self._load(context, folder)

    @torch.no_grad()
    def on_train_step_end(self, context) -> None:
        step = context.state.train_state.step + 1
        kept = min(self.decay, (1 + step) / (10 + step))
        if not context.skipped_iter:
            torch._foreach_lerp_(self.means, [one.detach().float() for one in self.parameters], 1 - kept)

    @torch.no_grad()
    def on_checkpoint_save(self, context) -> None:
        step = context.state.train_state.step
        whole = checkpoints.step_folder(self.folder, step)
        folder = whole / checkpoints.MEANS
        if distributed.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        distributed.barrier()
        with self._in_place(self.means):
            dist_checkpointing.save(self._state(context), str(folder))
            of_tensors = model_digests.of_model(context.model, context.state.cfg.peft)
        alpha = model_digests.alpha(context.model)
        if of_tensors is not None:
            self.weights = digests.of_all(of_tensors)
            shutil.copyfile(whole / CONFIG, folder / CONFIG)
            facts = {"step": step, "alpha": alpha, "prompts": len(agreement.rows(self.run)), "digests": of_tensors}
            digests.write(folder, facts)
        distributed.barrier()

    def as_weights(self) -> contextlib.AbstractContextManager[None]:
        """The model computes with the means, rounded to its type."""
        return self._in_place([mean.to(one.dtype) for mean, one in zip(self.means, self.parameters, strict=True)])

    def _load(self, context, folder: Path) -> None:
        with self._in_place(self.means):
            found: Any = dist_checkpointing.load(self._state(context), str(folder))
            for name, chunk in zip(found, unwrap_model(context.model), strict=True):
                chunk.load_state_dict(found[name], strict=False)

    def _state(self, context) -> dict[str, Any]:
        chunks = unwrap_model(context.model)
        names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
        state = {
            name: chunk.sharded_state_dict(metadata=model_digests.metadata())
            for name, chunk in zip(names, chunks, strict=True)
        }
        return model_digests.of_adapter(state, context.state.cfg.peft)

    @contextlib.contextmanager
    def _in_place(self, values: list[torch.Tensor]) -> Iterator[None]:
        """Have the model hold these values in place of its own for a while."""
        own = [one.data for one in self.parameters]
        for one, value in zip(self.parameters, values, strict=True):
            one.data = value
        try:
            yield
        finally:
            for one, value in zip(self.parameters, own, strict=True):
                one.data = value
