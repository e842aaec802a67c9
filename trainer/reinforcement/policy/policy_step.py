"""The forward_step of a policy: Megatron-Bridge's own, with another loss, at a temperature.

GPTModel's loss of a token is its negative log-probability, at every layout; the logits are not needed.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleVariableOverride=false
# pyright: reportOptionalMemberAccess=false

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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

from conf.schema.reinforcement import Reinforce
from conf.schema.run import Run
from trainer.megatron.whole_rows import whole
from trainer.reinforcement.batches import ROWS, Form, micro_batches
from trainer.reinforcement.policy.losses import Batch, by_answer, objective
from trainer.reinforcement.routes import Replay
from trainer.reinforcement.samples import Scored
from trainer.training.parity import forward_only

LARGEST = "mismatch_max"  # the only figure that is a maximum instead of a sum
NOBODY = -1  # megatron-core logs new numbers on this rank, that is, on none


class Feed(Callback):
    """Micro batches of the next optimizer step, as an endless data source for Bridge. It must be the last callback.

    With packing, the number of micro batches changes from step to step. Between two steps it must have the usual value,
    because Bridge would otherwise assume a schedule of growing batches.
    """

    def __init__(self):
        self.batches: list[dict[str, torch.Tensor]] = []
        self.usual = 0

    def give(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches, self.usual = list(batches), get_num_microbatches()
        _set_micro_batches(len(batches))

    def on_train_step_end(self, context: Any) -> None:
        _set_micro_batches(self.usual)

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
    # Stages in the middle of a pipeline learn only from these where packed sequences end.
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
    """The forward_step for Bridge's loop. It collects figures until take() is called."""

    def __init__(self, reinforce: Reinforce):
        self.reinforce = reinforce
        self.figures: dict[str, float] = {}
        self.tokens_per_count = 1.0
        self.replay = Replay()

    def begin(self, answers: Sequence[Scored]) -> None:
        """Prepare for the answers of an optimizer step.

        Megatron weighs the balancing loss of experts by tokens; other losses must be divided by tokens as well.
        """
        tokens = sum(sum(answer.sampled) for answer in answers)
        self.tokens_per_count = tokens / len(answers) if by_answer(self.reinforce.loss) else 1.0

    def __call__(self, state: Any, iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        inputs = {key: batch[key] for key in ROWS if key in batch}
        if "routes" in batch:
            self.replay.begin(model, batch)
        output, _ = gpt_step.forward_step(state, iter([inputs]), model)
        return output, partial(self._loss, batch)

    def take(self) -> dict[str, float]:
        """Return the figures since the last call."""
        figures, self.figures = self.figures, {}
        return figures

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor, non_loss_data: bool = False) -> Any:
        on_device = {key: value.to(output.device, non_blocking=True) for key, value in batch.items()}
        new = -whole(output.float(), on_device.get("cu_seqlens_q")).flatten()[on_device["places"]]
        if non_loss_data:
            return new
        of_answers = Batch(
            new=new,
            # With one update, the trained policy is still the policy before the batch.
            old=on_device["old"] if self.reinforce.updates > 1 else new.detach(),
            engine=on_device["engine"],
            advantages=on_device["advantages"],
            mask=on_device["mask"],
            reference=on_device["reference"] if self.reinforce.kl else None,
        )
        loss, figures = objective(self.reinforce, of_answers)
        add_figures(self.figures, figures)
        # Each context-parallel rank computes the loss of whole answers, and gets the gradients of its part of them.
        counts = float(parallel_state.get_context_parallel_rank() == 0)
        loss = loss * self.tokens_per_count
        tokens = (on_device["mask"].sum() * counts).to(torch.int)
        return loss, tokens, {"lm loss": torch.stack([loss.detach() * counts, tokens.to(loss.dtype)])}


def add_figures(total: dict[str, float], figures: Mapping[str, Any]) -> None:
    """Add figures to a total. All are sums, except the largest mismatch."""
    for key, value in figures.items():
        before = total.get(key, 0.0)
        total[key] = max(before, float(value)) if key == LARGEST else before + float(value)


def batches_of_rank(run: Run, answers: Sequence[Scored]) -> list[dict[str, torch.Tensor]]:
    """Micro batches of this data-parallel rank, from the answers of an optimizer step."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return micro_batches(answers, Form.of(run), rank, ranks)


def log_probs(run: Run, context: Any, step: PolicyStep, answers: Sequence[Scored]) -> dict[int, list[float]]:
    """Log-probabilities of this rank's answers by the current policy, by their numbers; empty before the last stage."""
    form, batches = Form.of(run), batches_of_rank(run, answers)
    outputs = forward_only(context, step, batches, form.rows, form.length)
    step.replay.end()
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return {}
    lengths = [batch["counts"].tolist() for batch in batches]
    return {
        number: values[:length]
        for batch, rows, counts in zip(batches, outputs, lengths, strict=True)
        for number, values, length in zip(batch["numbers"].tolist(), rows.tolist(), counts, strict=False)
    }


def _set_micro_batches(micro_batches: int) -> None:
    """Set the number of micro batches that the loop takes per step."""
    size, ranks = get_micro_batch_size(), parallel_state.get_data_parallel_world_size()
    reconfigure_num_microbatches_calculator(NOBODY, None, micro_batches * size * ranks, size, ranks, False)


class Temperature:
    """Division of the logits by the sampling temperature, which gives the policy that is sampled."""

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
