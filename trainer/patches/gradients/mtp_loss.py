"""Patch of the loss of MTP layers: only learned tokens count, as in the loss of the next token.

Megatron-Bridge gives the model no loss mask, so prompts and padding are learned too, and increase the weight of the
loss. And megatron-core weights the loss by the tokens of a micro batch and of a context-parallel rank divided by those
that an MTP layer predicts: layout.cp and data.packed change the function. Here the sum over the learned tokens that the
layer predicts is divided by all learned tokens (DeepSeek-V3's report, equation 24).

Packed rows are shifted within bounds without padding, which Bridge uses for attention. These differ from the rows'
actual positions: after the first row an MTP layer reads and predicts wrong tokens. Here the bounds with padding are
used.

Remove when Megatron-Bridge passes the mask, and megatron-core drops its weight and uses cu_seqlens_q_padded.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/multi_token_prediction.py
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from torch import distributed

from trainer.patches import versions
from trainer.patches.gradients import chunked_losses

LOSS_MASK = 2  # index in the tuple that get_batch() returns

_mask: torch.Tensor | None = None  # this rank's part of the micro batch in the forward pass
_sums: torch.Tensor | None = None  # of the losses, and of the learned tokens, of all MTP layers


def install() -> None:
    """Make MTP layers learn the tokens of the loss mask. A second call has no effect."""
    versions.check(__name__)
    if gpt_model.process_mtp_loss is not _process_mtp_loss:
        gpt_model.process_mtp_loss = _process_mtp_loss
        gpt_step.get_batch = _noting_mask(gpt_step.get_batch)
        multi_token_prediction._roll_tensor_packed_seq = _with_padded_bounds(
            multi_token_prediction._roll_tensor_packed_seq
        )


def figure() -> float:
    """Return the mean loss over learned tokens since the last call, of all ranks and layers. All ranks must call it."""
    sums = torch.zeros(2, dtype=torch.float64, device="cuda")
    if _sums is not None:
        sums += _sums
        _sums.zero_()
    distributed.all_reduce(sums)
    total, tokens = sums.tolist()
    return total / tokens if tokens else 0.0


def _add(losses: torch.Tensor, mask: torch.Tensor) -> None:
    global _sums
    if _sums is None:
        _sums = torch.zeros(2, dtype=torch.float64, device=losses.device)
    _sums += torch.stack([losses.detach().double().sum(), mask.double().sum()])


def _noting_mask(get_batch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_batch)
    def get_batch_and_mask(*args: Any, **kwargs: Any) -> Any:
        global _mask
        batch = get_batch(*args, **kwargs)
        _mask = batch[LOSS_MASK]
        return batch

    return get_batch_and_mask


def _process_mtp_loss(hidden_states: torch.Tensor, labels: torch.Tensor | None, **given: Any) -> torch.Tensor:
    """Return the hidden states of the model without those of MTP layers, whose losses join the backward pass."""
    config = given["config"]
    own, *predicted = hidden_states.chunk(1 + config.mtp_num_layers)
    if not torch.is_grad_enabled() or labels is None:
        return own
    assert _mask is not None, "an MTP layer ran in training without a batch"
    bounds = {name: given[name] for name in ("cp_group", "packed_seq_params")}
    learned, weight = _mask, config.mtp_loss_scaling_factor / config.mtp_num_layers
    for hidden in predicted:
        labels, _ = multi_token_prediction.roll_tensor(labels, **bounds)
        learned, _ = multi_token_prediction.roll_tensor(learned, **bounds)
        output = (given["output_layer"], given["output_weight"], given["compute_language_model_loss"])
        losses = chunked_losses.of(hidden, labels, *output) * learned
        _add(losses, _mask)
        own = multi_token_prediction.MTPLossAutoScaler.apply(own, weight * losses)
    return own


def _with_padded_bounds(roll: Callable[..., Any]) -> Callable[..., Any]:
    def roll_packed(tensor: torch.Tensor, shifts: int, dims: int, rows: Any, cp_group: Any = None) -> Any:
        padded = rows.cu_seqlens_q_padded
        ends = rows.cu_seqlens_q if padded is None else padded
        if cp_group is not None and cp_group.size() > 1:
            return roll(tensor, shifts, dims, SimpleNamespace(cu_seqlens_q=ends), cp_group)
        rolled = torch.roll(tensor, shifts, dims)
        rolled.index_fill_(dims, ends[1:].long() - 1, 0)  # all at once: core reads each from the GPU
        return rolled, rolled.sum()

    return roll_packed
