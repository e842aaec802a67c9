"""Forward pass of a policy in Megatron-Bridge's loop: its own, with another loss, at a temperature.

GPTModel's loss of a token is its negative log-probability: it is the same at every layout, and needs no logits.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleVariableOverride=false

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.training import gpt_step
from megatron.core.utils import unwrap_model

from trainer.reinforcement.losses import Batch, Settings, objective

LARGEST = "mismatch_max"  # of the figures, the one that is no sum


class Feed:
    """Micro batches of the next optimizer step, as an endless source of Bridge's."""

    def __init__(self):
        self.batches: list[dict[str, torch.Tensor]] = []

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

    def build_datasets(self, context: Any) -> tuple[Any, None, None]:
        return self.feed, None, None


class PolicyStep:
    """The forward_step of Bridge's loop, and the figures that it has seen since they were last taken."""

    def __init__(self, settings: Settings, with_old: bool, with_reference: bool):
        self.settings, self.with_old, self.with_reference = settings, with_old, with_reference
        self.figures: dict[str, float] = {}

    def __call__(self, state: Any, iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
        batch = next(iterator)
        shown = {key: batch[key] for key in ("tokens", "labels", "position_ids", "loss_mask")}
        output, _ = gpt_step.forward_step(state, iter([shown]), model)
        return output, partial(self._loss, batch)

    def take(self) -> dict[str, float]:
        found, self.figures = self.figures, {}
        return found

    def _loss(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
        given = {key: value.to(output.device, non_blocking=True) for key, value in batch.items()}
        new = -output.float()
        found = objective(
            self.settings,
            Batch(
                new=new,
                # With one update the policy that is trained is the one that the batch began with.
                old=given["old"] if self.with_old else new.detach(),
                engine=given["engine"],
                advantages=given["advantages"],
                mask=given["loss_mask"],
                reference=given["reference"] if self.with_reference else None,
            ),
        )
        for key, value in found.figures.items():
            before = self.figures.get(key, 0.0)
            self.figures[key] = max(before, float(value)) if key == LARGEST else before + float(value)
        count = found.count.to(torch.int)
        return found.loss, count, {"lm loss": torch.stack([found.loss.detach(), count.to(found.loss.dtype)])}


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
