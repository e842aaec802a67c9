"""Scores of all prepared rows by another model, with Megatron-Bridge's set-up and no step of its loop.

The model is cut as training is, and frozen below adapters that are off, so that it has no gradients and no optimizer.
dpo asks it for the log-probability of each answer, distill for its likeliest tokens at each place that is learned.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from torch import distributed

from conf.rules import objectives
from conf.schema.run import Run
from trainer.data import prepared, references
from trainer.data.references import Likeliest
from trainer.megatron.token_files import Answers, Rows, file
from trainer.objectives.forward import Teaching, scores
from trainer.startup.console import say
from trainer.training.parity import forward_only

PROGRESS = "progress.jsonl"
AT_ONCE = 16  # micro batches of a rank between two lines of progress


class Scoring(Callback):
    """All rows of training and validation, once the model has its weights."""

    def __init__(self, run: Run):
        self.run, self.folder = run, Path(run.paths.reference)

    def on_data_init_start(self, context: Any) -> None:
        with context.state.cfg.peft.disable_adapter(context.model):
            for split in splits(self.run):
                found = self._taught(context, split) if objectives.has_teacher(self.run) else self._of(context, split)
                if distributed.get_rank() == 0:
                    references.write(self.folder, split, found)
        if distributed.get_rank() == 0:
            references.finish(self.folder, references.wanted(self.run))
            say(f"reference: what it says of the rows is in {self.folder}")

    def _of(self, context: Any, split: str) -> np.ndarray:
        """Log-probabilities of the chosen and the rejected answer of each row."""
        rows = Answers(*self._file(split))
        found = np.zeros((len(rows), 2), np.float32)
        shape = (self.run.train.micro_batch, 2)
        for numbers, (said,) in self._passes(context, split, rows, scores, (shape,), (torch.float32,)):
            known = numbers < len(rows)
            found[numbers[known]] = said[known]
        return _together(found)

    def _taught(self, context: Any, split: str) -> Likeliest:
        """The likeliest tokens at each place that is learned."""
        rows, k = Rows(*self._file(split)), self.run.train.teacher_top_k
        places = [np.flatnonzero(rows[row][1][:-1]) for row in range(len(rows))]
        starts = np.concatenate([[0], np.cumsum([len(one) for one in places])]).astype(np.int64)
        values, ids = np.zeros((starts[-1], k), np.float32), np.zeros((starts[-1], k), np.int32)
        shape = (self.run.train.micro_batch, self.run.data.seq_length, k)
        kinds = (torch.float32, torch.int64)
        for numbers, said in self._passes(context, split, rows, Teaching(self.run), (shape, shape), kinds):
            for place, number in np.ndenumerate(numbers):
                if number < len(rows):
                    part = slice(starts[number], starts[number + 1])
                    values[part], ids[part] = (one[place][places[number]] for one in said)
        return Likeliest(_together(values), _together(ids), starts)

    def _passes(
        self, context: Any, split: str, rows: Rows, step: Callable, shapes: tuple, kinds: tuple
    ) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """Numbers of rows, [micro batches, rows], and what the model says of each, on every stage of the pipeline.

        Every rank has equally many micro batches, as experts on several ranks and a pipeline need them: numbers behind
        the last row are of none.
        """
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        train = self.run.train
        each = AT_ONCE * self.run.layout.pp * ranks * train.micro_batch
        for start in range(0, len(rows), each):
            numbers = np.arange(start, start + each).reshape(-1, ranks, train.micro_batch)[:, rank]
            known = numbers.clip(max=len(rows) - 1).tolist()
            batches = [rows.collate_fn([rows[row] for row in batch]) for batch in known]
            sequences = train.micro_batch * objectives.sequences(train)
            said = forward_only(context, step, batches, sequences, self.run.data.seq_length)
            wholes = enumerate(zip(shapes, kinds, strict=True))
            yield numbers, [_on_every_stage(said, i, (len(batches), *shape), kind) for i, (shape, kind) in wholes]
            self._tell(split, min(start + each, len(rows)), len(rows))

    def _file(self, split: str) -> tuple[str, int, int]:
        place = prepared.folder(self.run)
        return file(place, split), self.run.data.seq_length, prepared.load(place).pad_id

    def _tell(self, split: str, done: int, total: int) -> None:
        if distributed.get_rank() == 0:
            line = {"split": split, "done": done, "total": total, "time": time.time()}
            with (self.folder / PROGRESS).open("a") as log:
                log.write(json.dumps(line) + "\n")


def _on_every_stage(said: list[Any], which: int, shape: tuple[int, ...], kind: torch.dtype) -> np.ndarray:
    """One of the outputs of all micro batches, of this shape, which the last stage of a pipeline has."""
    found = torch.zeros(shape, dtype=kind, device="cuda")
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        found.copy_(torch.stack([one[which] for one in said]).view(shape))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    distributed.broadcast(found, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return found.cpu().numpy()


def splits(run: Run) -> list[str]:
    """Splits that training reads."""
    rows = prepared.load(prepared.folder(run)).rows
    return [split for split in ("training", "validation") if rows.get(split)]


def _together(found: np.ndarray) -> np.ndarray:
    """Rows of all data-parallel ranks: each has zeros for those of the others."""
    if parallel_state.get_data_parallel_world_size() == 1:
        return found
    mine = torch.from_numpy(found).cuda()
    distributed.all_reduce(mine, group=parallel_state.get_data_parallel_group())
    return mine.cpu().numpy()
