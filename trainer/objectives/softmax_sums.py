"""Squares of the logarithm of the softmax's sum, of each token that is learned, beside its own loss: z loss.

It keeps logits from drifting, which the softmax does not see (PaLM, Chowdhery et al. 2022, takes a weight of 1e-4). The
loss that is told stays that of the tokens; the squares are told as z_loss. A validation has none.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.core.utils import unwrap_model

from trainer.objectives.log_sum_exp import log_sum_exp


class WithZLoss:
    """The forward_step of next tokens, whose loss has `weight` times the squares."""

    def __init__(self, weight: float):
        self.weight = weight

    def __call__(self, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable]:
        chunk = unwrap_model(model)
        if not torch.is_grad_enabled() or not chunk.post_process:
            return gpt_step.forward_step(state, iterator, model)
        found: list[torch.Tensor] = []  # of each MTP layer first, and of the model last
        hook = chunk.output_layer.register_forward_hook(lambda module, given, made: found.append(_squares(made[0])))
        try:
            output, loss = gpt_step.forward_step(state, iterator, model)
        finally:
            hook.remove()
        squares = found[-1].transpose(0, 1).contiguous()
        return output + self.weight * squares, partial(self._loss, loss, squares.detach())

    def _loss(self, loss: Callable, squares: torch.Tensor, output: torch.Tensor) -> Any:
        whole, tokens, _ = loss(output)
        told = loss(output.detach() - self.weight * squares)[2] | {"z loss": loss(squares)[2]["lm loss"]}
        return whole, tokens, told


def _squares(logits: torch.Tensor) -> torch.Tensor:
    """Squares by token, of logits of which each tensor-parallel rank has those of a part of the vocabulary.

    Nothing of it needs the logits in the backward pass: core's loss is computed in their place.
    """
    return log_sum_exp(logits.float()) ** 2
