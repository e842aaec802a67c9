"""Patch of the loss after a frozen output layer: it has the logits of some tokens at a time.

Megatron-core computes the logits of a whole micro batch, and Transformer Engine's loss copies them. With Qwen3.5's
vocabulary of 248,320 and its MTP layer, 16,384 tokens have 24 GB of them. Here each chunk of tokens has its logits, its
losses, and then the gradient of its hidden states, which only depends on its own tokens. The backward pass multiplies
this gradient by that of the losses. A trained output layer needs the logits of all tokens, for its own gradient.

Remove when megatron-core's loss does the same on GPUs before Blackwell.
"""

# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false

import functools
from collections.abc import Callable
from typing import Any

import torch

from conf.rules import chunked_loss
from trainer.patches import versions

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of labels [row, token] and logits [token, row, word]


def install() -> None:
    """Compute the losses of all models of this process in chunks. A second call has no effect."""
    versions.check(__name__)
    from megatron.core.models.gpt.gpt_model import GPTModel

    if not hasattr(GPTModel._postprocess, "__wrapped__"):
        GPTModel._postprocess = _with_losses(GPTModel._postprocess)


def of(
    hidden: torch.Tensor, labels: torch.Tensor, output_layer: Any, output_weight: torch.Tensor | None, losses_of: Losses
) -> torch.Tensor:
    """Return the losses [row, token] of hidden states [token, row, number]."""
    weight = output_layer.weight if output_weight is None else output_weight

    def of_chunk(some: torch.Tensor, their_labels: torch.Tensor) -> torch.Tensor:
        return losses_of(their_labels, output_layer(some, weight=output_weight)[0])

    tokens = max(1, chunked_loss.LOGITS // (len(weight) * hidden.shape[1]))
    trained = weight.requires_grad or any(one.requires_grad for one in output_layer.parameters())
    if trained or tokens >= len(hidden) or output_layer.sequence_parallel:
        return of_chunk(hidden, labels)
    return of_chunks(hidden if torch.is_grad_enabled() else hidden.detach(), labels, of_chunk, tokens)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, labels, of_chunk, tokens):
        learns, found, gradients = ctx.needs_input_grad[0], [], []
        for some, their_labels in zip(hidden.split(tokens), labels.split(tokens, 1), strict=True):
            with torch.set_grad_enabled(learns):
                some = some.detach().requires_grad_(learns)
                of_some = of_chunk(some, their_labels)
            found.append(of_some.detach())
            if learns:
                gradients += torch.autograd.grad(of_some, some, torch.ones_like(of_some))
        if learns:
            ctx.save_for_backward(torch.cat(gradients))
        return torch.cat(found, 1)

    @staticmethod
    def backward(ctx, by):
        (gradient,) = ctx.saved_tensors
        return (gradient * by.t().unsqueeze(-1)).to(gradient.dtype), None, None, None


of_chunks = _Losses.apply


def _with_losses(postprocess: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(postprocess)
    def in_chunks(self: Any, **given: Any) -> torch.Tensor:
        if given["labels"] is not None and given.get("output_processor") is None:
            given["output_processor"] = _processor
        return postprocess(self, **given)

    return in_chunks


def _processor(
    *, hidden_states, labels, output_layer, output_weight, compute_language_model_loss, **others
) -> torch.Tensor:
    return of(hidden_states, labels, output_layer, output_weight, compute_language_model_loss)
