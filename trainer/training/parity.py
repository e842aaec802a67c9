"""Parity record: log-probabilities of fixed prompts by the trained model, written before its last checkpoint is marked.

The record has the log-probability of each token of the first rows of test.jsonl (else of validation.jsonl, else of
training.jsonl), computed by the trained base and adapter at the layout of the training. trainer/serving/agreement.py
computes the same with the served model and compares. With an adapter, the record also has the log-probabilities of the
base without the adapter. The difference is the adapter's effect, and a served model must not lose any part of it. A
digest identifies the trained weights.

With checkpoint.keep_best, the best checkpoint so far has its record in parity-best.json; with train.ema_decay, the
means of the weights have theirs in parity-ema.json.

The record is written after a checkpoint has been written and before it is marked. Therefore every complete training has
parity.json, and the computation here cannot change a checkpoint. If a finished run has no record (it was deleted, or
other rows were configured), training loads the last checkpoint, writes the record in on_data_init_start(), and takes no
step.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import json
from collections.abc import Callable
from itertools import chain
from math import lcm
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from conf.schema.run import Run
from contract.files import write_atomically
from trainer.megatron.whole_rows import whole
from trainer.serving import agreement, prompts
from trainer.startup.console import say
from trainer.training.metrics import from_last_stage
from trainer.training.validations import Validations
from trainer.training.weight_means import WeightMeans
from trainer.weights import digests, model_digests


class Parity(Callback):
    def __init__(self, run: Run, validations: Validations | None = None, means: WeightMeans | None = None):
        self.run, self.validations, self.means = run, validations, means

    def on_checkpoint_save(self, context) -> None:
        if context.state.train_state.step == context.state.cfg.train.train_iters:
            self._record(context, "")
        elif self.validations and self.validations.is_best(context.state.train_state.step):
            self._record(context, "-best")

    def _record(self, context, which: str) -> None:
        """Write the record of the weights, and that of their means if the run keeps means."""
        record(self.run, context, agreement.place(self.run, which))
        if self.means:
            with self.means.as_weights():
                record(self.run, context, agreement.place(self.run, f"{which}-ema"), self.means.weights)

    def on_data_init_start(self, context) -> None:
        """Write the record of a finished run, whose model and last checkpoint are loaded."""
        if context.state.cfg.validation.skip_train:
            record(self.run, context, Path(self.run.paths.parity))


def record(run: Run, context, path: Path, weights: str | None = None) -> None:
    """Write the record to this file. Collective: every rank must call it. `weights` is their digest, if known."""
    rows = agreement.rows(run)
    if not rows:
        return
    template = prompts.template(run, run.paths.model)
    pairs = [template.tokens(row) for row in rows]
    rows_of_tokens = [list(chain(*pair)) for pair in pairs]
    trained, adapter = log_probs(run, context, rows_of_tokens), context.state.cfg.peft
    of_base = None
    if adapter is not None:
        with adapter.disable_adapter(context.model):
            of_base = log_probs(run, context, rows_of_tokens)
    of_tensors = model_digests.of_model(context.model, adapter)
    if torch.distributed.get_rank() == 0:
        records = [
            {"prompt": template.prompt(row), "prompt_tokens": len(pairs[i][0]), "tokens": tokens}
            | {"log_probs": trained[i][: len(tokens) - 1]}
            for i, (row, tokens) in enumerate(zip(rows, rows_of_tokens, strict=True))
        ]
        for row, base in zip(records, of_base or [], strict=False):
            row["base_log_probs"] = base[: len(row["log_probs"])]
        facts = {"step": context.state.train_state.step, "asked": agreement.fingerprint(run)}
        facts |= {"weights": weights or digests.of_all(of_tensors), "precision": run.train.precision}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(facts | {"rows": records}, ensure_ascii=False), durable=True)
        say(f"parity: log-probabilities of {len(rows)} prompts in {path}")


def log_probs(run: Run, context, rows_of_tokens: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of each prompt's tokens except the first.

    Numbers after the end of a shorter prompt have no meaning.
    """
    layout = run.layout
    pieces = lcm(16, (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1))
    longest = max(len(tokens) for tokens in rows_of_tokens) - 1
    length = min(-(-longest // pieces) * pieces, run.data.seq_length)
    batches = [_batch(tokens, length) for tokens in rows_of_tokens]
    batches += batches[-1:] * (-len(batches) % layout.pp)  # interleaved stages work in groups of pp

    losses = forward_only(context, _losses, batches, rows=1, length=length)
    all_losses = torch.zeros(len(batches), length, device="cuda")
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        all_losses.copy_(whole(torch.cat(losses).float(), None))
    return (-from_last_stage(all_losses)).tolist()


def forward_only(context, step: Callable, batches: list[dict], rows: int, length: int) -> list[Any]:
    """Run a forward_step on micro batches without training. Returns its outputs, on the last pipeline stage."""
    chunks = context.model
    training, config = [chunk.training for chunk in chunks], get_model_config(chunks[0])
    timers, config.timers = config.timers, None
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=lambda iterator, chunk: step(context.state, iterator, chunk),
            data_iterator=[iter([dict(batch) for batch in batches]) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=True,
            collect_non_loss_data=True,
        )
    for chunk, mode in zip(chunks, training, strict=True):
        chunk.train(mode)
    config.timers = timers
    return outputs


def _losses(state, iterator, chunk) -> tuple[torch.Tensor, Callable]:
    """A forward_step that returns each token's loss."""
    return forward_step(state, iterator, chunk)[0], lambda losses, non_loss_data: losses


def _batch(tokens: list[int], length: int) -> dict[str, torch.Tensor]:
    """One row in the data loader's format. Padding after a row does not change the values before it."""
    padded = torch.tensor([tokens + [tokens[-1]] * (length + 1 - len(tokens))])
    return {
        "tokens": padded[:, :-1].contiguous(),
        "labels": padded[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, length),
        "position_ids": torch.arange(length)[None],
    }
