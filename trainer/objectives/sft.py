"""Supervised fine-tuning and pretraining: the loss of the next token, and the z loss.

The z loss adds the squared logarithm of the softmax's sum of each learned token to its loss.

It keeps logits from drifting, which does not change the softmax (PaLM, Chowdhery et al. 2022, uses a weight of 1e-4).
The logged loss is that of the tokens; the mean of the squares is logged as z_loss. A validation has no z loss.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.core.utils import unwrap_model

from conf.schema.run import Run
from trainer.objectives.log_sum_exp import log_sum_exp


def step(run: Run) -> Any:
    """Return the forward_step for Bridge's loop, which is Bridge's own without a z loss."""
    return partial(_forward, run.train.z_loss) if run.train.z_loss else gpt_step.forward_step


def _forward(weight: float, state: Any, iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """The forward_step of sft, after its first argument, with `weight` times the squares added to the loss."""
    chunk = unwrap_model(model)
    if not torch.is_grad_enabled() or not chunk.post_process:
        return gpt_step.forward_step(state, iterator, model)
    all_squares: list[torch.Tensor] = []  # first of each MTP layer, last of the model
    # From the logits of this rank's part of the vocabulary, in fp32: Megatron-core's loss overwrites the logits.
    hook = chunk.output_layer.register_forward_hook(
        lambda module, inputs, outputs: all_squares.append(log_sum_exp(outputs[0].float()) ** 2)
    )
    try:
        output, loss = gpt_step.forward_step(state, iterator, model)
    finally:
        hook.remove()
    squares = all_squares[-1].transpose(0, 1).contiguous()
    return output + weight * squares, partial(_loss, weight, loss, squares.detach())


def _loss(weight: float, loss: Callable, squares: torch.Tensor, output: torch.Tensor) -> Any:
    total, tokens, _ = loss(output)
    figures = loss(output.detach() - weight * squares)[2] | {"z loss": loss(squares)[2]["lm loss"]}
    return total, tokens, figures
