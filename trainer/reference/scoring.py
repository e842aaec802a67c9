"""Log-probabilities of all prepared rows by the reference, with Megatron-Bridge's set-up and no step of its loop.

The reference is the base. The model is built as training builds it, at the same layout and with the same adapters,
which are off: it needs no more memory than training, and says of each row what training begins with.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from torch import distributed

from conf.schema.run import Run
from trainer.data import prepared, references
from trainer.megatron.token_files import Answers, file
from trainer.objectives.forward import scores
from trainer.startup.console import say
from trainer.training.parity import forward_only

PROGRESS = "progress.jsonl"
AT_ONCE = 16  # micro batches of a rank between two lines of progress


class Scoring(Callback):
    """All rows of training and validation, once the model has its weights."""

    def __init__(self, run: Run):
        self.run, self.folder = run, Path(run.paths.reference)

    def on_data_init_start(self, context: Any) -> None:
        adapter = context.state.cfg.peft
        with adapter.disable_adapter(context.model) if adapter else contextlib.nullcontext():
            for split in splits(self.run):
                found = self._split(context, split)
                if distributed.get_rank() == 0:
                    references.write(self.folder, split, found)
        if distributed.get_rank() == 0:
            references.finish(self.folder, references.wanted(self.run))
            say(f"reference: log-probabilities of the rows in {self.folder}")

    def _split(self, context: Any, split: str) -> np.ndarray:
        place = prepared.folder(self.run)
        rows = Answers(file(place, split), self.run.data.seq_length, prepared.load(place).pad_id)
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        found = np.zeros((len(rows), 2), np.float32)
        each = self.run.train.micro_batch
        step = AT_ONCE * self.run.layout.pp * ranks * each
        for start in range(0, len(rows), step):
            # Every rank has equally many micro batches, as experts on several ranks and a pipeline need them.
            numbers = np.arange(start, start + step).reshape(-1, ranks, each)[:, rank].clip(max=len(rows) - 1)
            said = self._said(context, [rows.collate_fn([rows[row] for row in batch]) for batch in numbers.tolist()])
            for batch, scored in zip(numbers, said, strict=True):
                found[batch] = scored
            self._tell(split, min(start + step, len(rows)), len(rows))
        return _together(found, ranks)

    def _said(self, context: Any, batches: list[dict[str, Any]]) -> list[np.ndarray]:
        """Both answers' log-probabilities of each pair of these micro batches, on every stage of the pipeline."""
        each, length = self.run.train.micro_batch, self.run.data.seq_length
        losses = forward_only(context, scores, batches, rows=2 * each, length=length)
        found = torch.zeros(len(batches), 2, each, device="cuda")
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            found.copy_(torch.stack(losses).view_as(found))
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        distributed.broadcast(found, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return list(found.transpose(1, 2).cpu().numpy())

    def _tell(self, split: str, done: int, total: int) -> None:
        if distributed.get_rank() == 0:
            line = {"split": split, "done": done, "total": total, "time": time.time()}
            with (self.folder / PROGRESS).open("a") as file:
                file.write(json.dumps(line) + "\n")


def splits(run: Run) -> list[str]:
    """Splits that training reads."""
    rows = prepared.load(prepared.folder(run)).rows
    return [split for split in ("training", "validation") if rows.get(split)]


def _together(found: np.ndarray, ranks: int) -> np.ndarray:
    """Rows of all data-parallel ranks: each has zeros for those of the others."""
    if ranks == 1:
        return found
    mine = torch.from_numpy(found).cuda()
    distributed.all_reduce(mine, group=parallel_state.get_data_parallel_group())
    return mine.cpu().numpy()
