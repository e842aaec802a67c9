"""Losses of a packed base (model.base) and of its source on the run's held-out rows, before the first step.

Both forward passes use the same micro batches: rows for validation, or training rows if the run validates nothing,
because the base has not learned those yet. Adapters are off. The source needs no more memory than training: each
product reads its matrices from the base's files (packed_base/originals.py), once per micro batch. Therefore
packed_base.measured_batches() takes few of them.

A line of kind packing in metrics.jsonl has, in nats per token: packed_loss, unpacked_loss, cost (their difference),
cost_error (its standard error over tokens), distance (root of the mean square of each token's difference); and tokens
and seconds. share is the mean square relative to the variance of the tokens' losses. Without log.packing_cost, the
figures of the unpacked base are missing.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.data.loaders import get_train_valid_test_num_samples
from megatron.bridge.data.utils import get_dataset_provider
from megatron.bridge.training import gpt_step
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import GPTDatasetConfig
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.core import parallel_state
from torch import distributed
from torch.utils.data import default_collate

from conf.model_files import config_json, quantization
from conf.rules import packed_base
from conf.schema.run import Run
from contract import checkpoints
from contract.faults import Fault
from trainer.startup import heartbeat
from trainer.startup.console import say
from trainer.training.metrics import Metrics, from_last_stage
from trainer.training.parity import forward_only
from trainer.weights.conversion import unwritten
from trainer.weights.packed_base.originals import originals

# Above these there is a warning. Rounding to 4 bits costs 0.02 to 0.1, and moves losses less than they vary.
COST, ERRORS, SHARE = 0.2, 3, 1.0


class PackingCost(Callback):
    """Callback after Metrics. It is created before process groups exist, because opening a base requires this."""

    def __init__(self, run: Run, metrics: Metrics):
        self.run, self.metrics, self.stored = run, metrics, None
        released = config_json.read(Path(run.paths.model) / config_json.NAME)
        if packed_base.measures_cost(run, bool(released.get(quantization.KEY))):
            try:
                self.stored = unwritten.open_base(run, checkpoints.step_folder(Path(run.paths.base), 0))
            except Fault as fault:
                say(f"train: the loss of the unpacked base is not measured: {fault}")

    def on_train_start(self, context: Any) -> None:
        heartbeat.phase("validating")
        began, chunks = time.monotonic(), context.model
        split, batches = self._batches(context)
        with context.state.cfg.peft.disable_adapter(chunks):
            packed = self._losses(context, batches)
            with originals(self.stored, chunks) if self.stored else contextlib.nullcontext():
                unpacked = self._losses(context, batches) if self.stored else packed
        self.stored = None  # a base without weights holds its pieces in memory
        figures = _figures(packed, unpacked)
        if not figures["tokens"]:
            return
        line = {"packed_loss": figures["packed_loss"], "tokens": figures["tokens"]} if unpacked is packed else figures
        line |= {"seconds": time.monotonic() - began}
        self.metrics.write({"kind": "packing", "step": 0, "time": time.time(), "rows": split, **line})
        say(_text(self.run.model.base, split, line))

    def _batches(self, context: Any) -> tuple[str, list[dict[str, Any]]]:
        """Return the name of the split, and this rank's micro batches."""
        config, run = context.state.cfg, self.run
        groups = {"tokenizer": context.state.tokenizer, "pg_collection": get_pg_collection(context.model)}
        more = {} if isinstance(config.dataset, GPTDatasetConfig) else groups
        provider, samples = get_dataset_provider(config.dataset), get_train_valid_test_num_samples(config)
        training, validation, _ = provider(samples, config.dataset, **more)
        split, rows = ("validation", validation) if validation is not None else ("training", training)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        each = run.train.micro_batch
        count = min(packed_base.measured_batches(run), math.ceil(len(rows) / (ranks * each)))
        collate = getattr(rows, "collate_fn", default_collate)
        starts = [(number * ranks + rank) * each for number in range(count)]
        return split, [collate([rows[i % len(rows)] for i in range(start, start + each)]) for start in starts]

    def _losses(self, context: Any, batches: list[dict[str, Any]]) -> list[tuple[torch.Tensor, Callable]]:
        """Return the losses of the tokens of each micro batch and the function that sums them; on the last stage."""
        rows, length = batches[0]["tokens"].shape  # packs are joined to one row
        extra = batches[-1:] * (-len(batches) % (self.run.layout.pp if self.run.layout.vpp else 1))
        batches = [*batches, *extra]  # interleaved stages work in groups
        outputs = forward_only(context, _step, batches, rows=rows, length=length)
        return outputs[: len(batches) - len(extra)]


def _step(state: Any, iterator: Iterator[dict[str, Any]], chunk: Any) -> tuple[torch.Tensor, Callable]:
    heartbeat.phase("validating")
    output, loss = gpt_step.forward_step(state, iterator, chunk)
    return output, lambda losses, non_loss_data: (losses.detach().float(), loss)


def _figures(packed: list[tuple[torch.Tensor, Callable]], unpacked: list[tuple[torch.Tensor, Callable]]) -> dict:
    """Return the figures over the tokens of all ranks, on all ranks."""
    sums = torch.zeros(5, 2, dtype=torch.float64, device="cuda")
    for (of_packed, loss), (of_unpacked, _) in zip(packed, unpacked, strict=True):
        change = of_packed - of_unpacked
        values = (of_packed, of_unpacked, of_unpacked.square(), change, change.square())
        sums += torch.stack([loss(one)[2]["lm loss"] for one in values])
    distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        sums = from_last_stage(sums)
    tokens = int(sums[0, 1])
    of_packed, of_unpacked, square, change, moved = (sums[:, 0] / max(1, tokens)).tolist()
    spread = {"cost_error": math.sqrt(max(0.0, moved - change**2) / max(1, tokens)), "distance": math.sqrt(moved)}
    figures = {"packed_loss": of_packed, "unpacked_loss": of_unpacked, "cost": of_packed - of_unpacked, **spread}
    return figures | {"share": moved / max(square - of_unpacked**2, 1e-12), "tokens": tokens}


def _text(base: str, split: str, line: dict) -> str:
    text = f"model.base {base}: loss {line['packed_loss']:.4f} on {line['tokens']} tokens of {split} rows"
    if "cost" not in line:
        return f"{text} before training"
    text += f", unpacked {line['unpacked_loss']:.4f}: packing costs {line['cost']:.4f} +- {line['cost_error']:.4f} nats"
    text += f" per token ({line['seconds']:.0f} s)"
    if line["cost"] < max(COST, ERRORS * line["cost_error"]) and line["share"] < SHARE:
        return text
    return f"warning: {text}, more than rounding does: codes or scales may be of other weights"
