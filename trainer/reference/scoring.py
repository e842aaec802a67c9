"""Scores of all prepared rows by another model, with Megatron-Bridge's set-up and without a step of its loop.

The model has the layout of the training. It is frozen, with adapters that are switched off, and therefore has no
gradients and no optimizer. If dpo starts from an adapter, the reference is the base with that adapter. dpo needs the
log-probability of each answer, distill the likeliest tokens at each learned position.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from torch import distributed

from conf.rules import objectives
from conf.rules.objectives import AT_ONCE
from conf.schema.run import Run
from trainer.data import prepared, references
from trainer.megatron.token_files import Answers, Rows, file
from trainer.objectives.distill import TeacherStep
from trainer.objectives.dpo import scores
from trainer.reference import parts
from trainer.startup import heartbeat
from trainer.startup.console import say
from trainer.training.parity import forward_only
from trainer.weights.atomic_folder import gather

PROGRESS = "progress.jsonl"


class Scoring(Callback):
    """All rows of training and validation, once the model has its weights."""

    def __init__(self, run: Run):
        self.run, self.folder = run, Path(run.paths.reference)
        self.rows = {split: self._rows(split) for split in splits(run)}
        self.scored = 0  # rows of all splits, by all ranks

    def on_data_init_start(self, context: Any) -> None:
        # Bridge's handler only has an effect between two steps, and this loop has no steps.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        first = distributed.get_rank() == 0
        if first:
            references.begin(self.folder)
            parts.begin(self.folder, references.recorded_facts(self.run))
        missing, written = (self._missing(), parts.names(self.folder)) if first else ({}, [])
        for split, numbers in gather(missing)[0].items():
            self.scored += len(self.rows[split]) - len(numbers)
            starts = objectives.has_starting_adapter(self.run)
            adapter = context.state.cfg.peft
            with contextlib.nullcontext() if starts else adapter.disable_adapter(context.model):
                written += self._score(context, split, numbers)
        of_all = gather(written)
        heartbeat.phase("joining")
        if first:
            for split, rows in self.rows.items():
                parts.join(self.folder, split, len(rows), [name for names in of_all for name in names])
            references.finish(self.folder, references.recorded_facts(self.run))
            parts.end(self.folder)
            say(f"reference: the scores of the rows are in {self.folder}")

    def _missing(self) -> dict[str, np.ndarray]:
        """Numbers of the rows of each split that have no score yet."""
        missing = {split: parts.missing(self.folder, split, len(rows)) for split, rows in self.rows.items()}
        total, count = sum(map(len, self.rows.values())), sum(map(len, missing.values()))
        if count < total:
            say(f"reference: continues with {count} of {total} rows; the others already have scores")
        return missing

    def _score(self, context: Any, split: str, numbers: np.ndarray) -> list[str]:
        """Score these rows. Returns the names of the parts that this rank has written."""
        rows, written = self.rows[split], parts.Parts(self.folder, split)
        teaches = objectives.has_teacher(self.run)
        step = TeacherStep(self.run) if teaches else scores
        sequences = self.run.train.micro_batch * objectives.sequences(self.run.train)
        for of_rank, batches in self._passes(split, numbers):
            results = forward_only(context, step, batches, rows=sequences, length=self.run.data.seq_length)
            if _writes():
                wholes = [torch.stack(outputs).cpu().numpy() for outputs in zip(*results, strict=True)]
                for place, row in np.ndenumerate(of_rank):
                    if row < 0:
                        continue
                    if teaches:
                        learned = np.flatnonzero(rows[row][1][:-1])
                        values, ids = (whole[place][learned] for whole in wholes)
                        written.add(row, values, ids.astype(np.int32))
                    else:
                        written.add(row, wholes[0].reshape(*of_rank.shape, 2)[place][None])
                written.write()
        written.write(last=True)
        return written.names

    def _passes(self, split: str, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, list[dict[str, Any]]]]:
        """Numbers of rows for this rank, [micro batches, rows], and their batches.

        Every rank has the same number of micro batches, which pipelines and experts on several ranks need. The last row
        fills them up, with the number -1.
        """
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        rows, size = self.rows[split], self.run.train.micro_batch
        each = AT_ONCE * self.run.layout.pp * ranks * size
        for start in range(0, len(numbers), each):
            heartbeat.phase("answering" if start else "first step")
            now = numbers[start : start + each]
            of_rank = np.concatenate([now, np.full(-len(now) % each, -1)]).reshape(-1, ranks, size)[:, rank]
            filled = np.where(of_rank < 0, now[-1], of_rank)
            yield of_rank, [rows.collate_fn([rows[row] for row in batch]) for batch in filled.tolist()]
            self.scored += len(now)
            heartbeat.step(self.scored)
            if distributed.get_rank() == 0:
                total = sum(map(len, self.rows.values()))
                line = {"split": split, "done": self.scored, "total": total, "time": time.time()}
                with (self.folder / PROGRESS).open("a") as log:
                    log.write(json.dumps(line) + "\n")

    def _rows(self, split: str) -> Rows:
        place = prepared.folder(self.run)
        kind = Rows if objectives.has_teacher(self.run) else Answers
        return kind(file(place, split), self.run.data.seq_length, prepared.load(place).pad_id)


def _writes() -> bool:
    """Whether this rank writes the scores of its data-parallel rank: of all ranks that compute them, one does."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return last and first


def splits(run: Run) -> list[str]:
    """Splits that training reads."""
    rows = prepared.load(prepared.folder(run)).rows
    return [split for split in ("training", "validation") if rows.get(split)]
