"""Forward pass of a policy in Megatron-Bridge's loop: its own, with another loss, at a temperature.

GPTModel's loss of a token is its negative log-probability: it is the same at every layout, and needs no logits.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleVariableOverride=false
# pyright: reportOptionalMemberAccess=false

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.data.packing import PackedSequenceSpecs
from megatron.bridge.training import gpt_step
from megatron.bridge.training.callbacks import Callback
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_micro_batch_size,
    get_num_microbatches,
    reconfigure_num_microbatches_calculator,
)
from megatron.core.utils import unwrap_model
from torch import distributed

from conf.schema.run import Run
from trainer.megatron.whole_rows import whole
from trainer.reinforcement.batches import ROWS, Form
from trainer.reinforcement.policy.losses import Batch, Settings, by_answer, objective
from trainer.reinforcement.routes import Replay
from trainer.reinforcement.samples import Scored
from trainer.training.parity import forward_only

LARGEST = "mismatch_max"  # of the figures, the one that is no sum
NOBODY = -1  # the rank that core tells of each new number


class Feed(Callback):
    """Micro batches of the next optimizer step, as an endless source of Bridge's. It is the last of the callbacks.

    Packed, their number differs from step to step. Bridge takes it for a schedule of growing batches, unless the number
    is what it was between two steps.
    """

    def __init__(self):
        self.batches: list[dict[str, torch.Tensor]] = []
        self.usual = 0

    def give(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches, self.usual = list(batches), get_num_microbatches()
        _take(len(batches))

    def on_train_step_end(self, context: Any) -> None:
        _take(self.usual)

    def __iter__(self) -> "Feed":
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        return self.batches.pop(0)


@dataclass(kw_only=True)
class FromOutside(DatasetProvider):
    """Bridge's dataset settings for a feed."""

    feed: Feed
    seq_length: int
    do_validation: bool = False
    dataloader_type: str | None = "external"
    num_workers: int | None = 0
    # Stages in the middle of a pipeline are told where packed sequences end by these alone.
    enable_offline_packing: bool = False
    offline_packing_specs: PackedSequenceSpecs | None = None

    @classmethod
    def of(cls, run: Run, feed: Feed) -> "FromOutside":
        length, packed = run.data.seq_length, run.data.packed
        specs = PackedSequenceSpecs(packed_sequence_size=length) if packed else None
        return cls(feed=feed, seq_length=length, enable_offline_packing=packed, offline_packing_specs=specs)

    def build_datasets(self, context: Any) -> tuple[Any, None, None]:
        return self.feed, None, None


class PolicyStep:
    """The forward_step of Bridge's loop, and the figures that it has seen since they were last taken."""

    def __init__(self, settings: Settings, with_old: bool, with_reference: bool):
        self.settings, self.with_old, self.with_reference = settings, with_old, with_reference
        self.figures: dict[str, float] = {}
        self.tokens_per_count = 1.0
        self.replay = Replay()

    def begin(self, answers: Sequence[Scored]) -> None:
        """Take note of all answers of an optimizer step.

        Megatron weighs what keeps experts balanced by tokens, so that losses have to be divided by tokens as well.
        """
        tokens = sum(sum(one.sampled) for one in answers)
        self.tokens_per_count = tokens / len(answers) if by_answer(self.settings.loss) else 1.0

    def __call__(self, state: Any, iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        shown = {key: batch[key] for key in ROWS if key in batch}
        if "routes" in batch:
            self.replay.begin(model, batch)
        output, _ = gpt_step.forward_step(state, iter([shown]), model)
        return output, partial(self._loss, batch)

    def take(self) -> dict[str, float]:
        found, self.figures = self.figures, {}
        return found

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor, non_loss_data: bool = False) -> Any:
        given = {key: value.to(output.device, non_blocking=True) for key, value in batch.items()}
        new = -whole(output.float(), given.get("cu_seqlens_q")).flatten()[given["places"]]
        if non_loss_data:
            return new
        found = objective(
            self.settings,
            Batch(
                new=new,
                # With one update the policy that is trained is the one that the batch began with.
                old=given["old"] if self.with_old else new.detach(),
                engine=given["engine"],
                advantages=given["advantages"],
                mask=given["mask"],
                reference=given["reference"] if self.with_reference else None,
            ),
        )
        for key, value in found.figures.items():
            before = self.figures.get(key, 0.0)
            self.figures[key] = max(before, float(value)) if key == LARGEST else before + float(value)
        # Each context-parallel rank computes the loss of whole answers, with gradients of its own part of them.
        counts = float(parallel_state.get_context_parallel_rank() == 0)
        loss = found.loss * self.tokens_per_count
        tokens = (given["mask"].sum() * counts).to(torch.int)
        return loss, tokens, {"lm loss": torch.stack([loss.detach() * counts, tokens.to(loss.dtype)])}


def log_probs(
    run: Run, context: Any, step: PolicyStep, batches: list[dict[str, torch.Tensor]]
) -> dict[int, list[float]]:
    """Log-probabilities of the answers of a rank's micro batches, by the policy as it is; by their numbers."""
    form = Form.of(run)
    found = forward_only(context, step, batches, form.rows, form.length)
    named: list[Any] = [None]
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        lengths = [batch["counts"].tolist() for batch in batches]
        named = [
            {
                number: values[:length]
                for batch, rows, counts in zip(batches, found, lengths, strict=True)
                for number, values, length in zip(batch["numbers"].tolist(), rows.tolist(), counts, strict=False)
            }
        ]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    distributed.broadcast_object_list(named, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return named[0]


def _take(micro_batches: int) -> None:
    """Have the loop take so many micro batches from now on."""
    size, ranks = get_micro_batch_size(), parallel_state.get_data_parallel_world_size()
    reconfigure_num_microbatches_calculator(NOBODY, None, micro_batches * size * ranks, size, ranks, False)


class Temperature:
    """Division of the logits, which makes the policy the one that is sampled at a temperature."""

    def __init__(self, value: float):
        self.value, self.on = value, True

    def install(self, model: Any) -> None:
        if self.value == 1:
            return
        for chunk in unwrap_model(model):
            if getattr(chunk, "output_layer", None) is not None:
                chunk.output_layer.register_forward_hook(self._divide)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def _divide(self, layer: Any, inputs: Any, outputs: Any) -> Any:
        return (outputs[0] / self.value, *outputs[1:]) if self.on else outputs
