"""Patch: router losses and the expert bias count each row of the data equally, and ignore padding.

Megatron-core computes a balancing loss over the tokens of a micro batch (aux_loss) or of a sequence in it
(seq_aux_loss), so the function depends on train.micro_batch and on packing. Padding counts, because Megatron-Bridge
passes no mask. The expert bias cannot use one: a mask of tokens does not fit a table of tokens and experts. And all of
it is weighted by tokens, while the loss of the tokens is divided by the number of learned ones.

Here the balancing loss is that of a row: of an example up to its last learned token, alone in a sequence or packed with
others. A row is weighted by its learned tokens, as in the loss of the tokens, and a coefficient multiplies a mean over
rows. The same holds for the z loss. Neither depends on the micro batch, on the layout, on packing or on padding. The
bias counts only tokens of rows.

Remove when megatron-core takes the bounds of packed rows and a padding mask for all three.
https://github.com/NVIDIA/Megatron-LM/issues/6108
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/moe/router.py
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.bridge.training import gpt_step
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from trainer.megatron.routers.recomputed import Recomputed
from trainer.megatron.routers.rows_of_tokens import Rows, rows_of
from trainer.megatron.whole_rows import of_this_rank
from trainer.patches import versions

WRITTEN_FOR = {"megatron-bridge": ("0.6.2",), "megatron-core": ("0.19.2",)}
WEIGHT = "row_weight"  # key of a batch whose rows all have this weight, in tokens
LOSSES = ("aux_loss", "router_z_loss")

_current: Rows | None = None
_sums: torch.Tensor | None = None  # for each of LOSSES the sum over tokens, and their weight


def install() -> None:
    """Make routers use rows. A second call has no effect."""
    versions.check(__name__, WRITTEN_FOR)
    if hasattr(TopKRouter, "routing_without_rows"):
        return
    TopKRouter.routing_without_rows = TopKRouter.routing
    TopKRouter.routing = _routing
    TopKRouter.apply_z_loss = _apply_z_loss
    TopKRouter._apply_aux_loss = _balancing("aux_loss")
    TopKRouter._apply_seq_aux_loss = _balancing("seq_aux_loss")
    TopKRouter._apply_expert_bias = _apply_expert_bias
    gpt_step.get_batch = _noting_rows(gpt_step.get_batch)


def figures() -> dict[str, float]:
    """Return the means over the rows since the last call, of all ranks and layers, by name. All ranks must call it."""
    totals = torch.zeros(len(LOSSES), 2, dtype=torch.float64, device="cuda")
    if _sums is not None:
        totals += _sums
        _sums.zero_()
    torch.distributed.all_reduce(totals)
    return {
        name: value / weight if weight else 0.0 for name, (value, weight) in zip(LOSSES, totals.tolist(), strict=True)
    }


def _noting_rows(get_batch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that gives Bridge a batch, on every pipeline stage."""

    def get_batch_and_rows(iterator: Iterator[dict[str, Any]], config: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return get_batch(iterator, config, *args, **kwargs)
        batch = next(iterator)
        _note(batch, config.model)
        return get_batch(iter([batch]), config, *args, **kwargs)

    return get_batch_and_rows


def _note(batch: dict[str, Any], model: Any) -> None:
    global _current
    cut = batch.get("cu_seqlens_q_padded", batch.get("cu_seqlens_q"))
    mask, cut = (part if part is None else part.to("cuda", non_blocking=True) for part in (batch["loss_mask"], cut))
    rows = rows_of(mask, cut, 1 + (model.mtp_num_layers or 0), batch.get(WEIGHT))
    number = of_this_rank(rows.number.permute(1, 2, 0), cut, model.sequence_parallel)
    rows = Rows(number.t().contiguous(), rows.length, rows.share)
    if _current is None or model.cuda_graph_impl == "none":
        _current = rows
    else:  # recorded layers always read the same memory, and are never recomputed
        for old, new in zip(_current, rows, strict=True):
            old.copy_(new)


def _routing(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
    if self.training:
        assert _current is not None, "a router ran in training without a batch"
        rows = vars(self).setdefault("recomputed", Recomputed()).take(_current)
        depth = self.layer_number if self.is_mtp_layer else 0
        self.rows = Rows(*(part[depth] for part in rows))
    return self.routing_without_rows(logits, padding_mask)


def _apply_z_loss(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
    if not (self.config.moe_z_loss_coeff and self.training and torch.is_grad_enabled()):
        return logits
    squares = torch.logsumexp(logits, dim=-1) ** 2 @ self.rows.share[self.rows.number].to(logits.dtype)
    _add("router_z_loss", squares, self)
    return MoEAuxLossAutoScaler.apply(logits, squares * self.config.moe_z_loss_coeff)


def _balancing(kind: str) -> Callable[..., torch.Tensor]:
    """Return the function for this kind of balancing loss. Both kinds compute the loss per row."""

    def balance(
        self: Any, probs: torch.Tensor, scores: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Attach the loss to `probs`: for each row, experts * sum over experts of (share of choices * mean score)."""
        coefficient = self.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        rows, experts = self.rows, self.config.num_moe_experts
        chosen = torch.zeros(len(rows.length), experts, device=scores.device)
        chosen.index_add_(0, rows.number, routing_map.reshape(-1, experts).float())
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(chosen, group=self.tp_cp_group)
        of_choice = chosen * (rows.share / rows.length * (experts / self.topk))[:, None]
        loss = (scores.reshape(-1, experts).float() * of_choice[rows.number]).sum()
        _add("aux_loss", loss, self)
        return MoEAuxLossAutoScaler.apply(probs, loss * coefficient)

    return balance


def _apply_expert_bias(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
    if self.enable_expert_bias and torch.is_grad_enabled():
        counts = self.rows.number < len(self.rows.length) - 1
        self.local_tokens_per_expert += (routing_map & counts[:, None]).sum(dim=0)


def _add(name: str, loss: torch.Tensor, router: Any) -> None:
    """Add this rank's part of a loss to the sums of figures()."""
    global _sums
    if _sums is None:
        _sums = torch.zeros(len(LOSSES), 2, dtype=torch.float64, device=loss.device)
    weight = (router.rows.share * router.rows.length).sum() / router.tp_cp_group.size()
    _sums[LOSSES.index(name)] += torch.stack([loss.detach().double(), weight.double()])
