"""Patch for packed rows with train.micro_batch above 1: the packs of a micro batch are joined to one row.

The host starts as many kernels for a short micro batch as for a long one: with Qwen3-30B-A3B on an H100, packs of 2,048
tokens trained 3,470 tokens/s, and packs of 8,192 tokens 10,140. Megatron-Bridge refuses micro batches of several packs,
because attention over packed rows takes a single row. Here that row has all packs of the micro batch, one after the
other, with the ends of all their rows. Batches, orders and checkpoints still count packs, and Bridge splits a batch as
before. Pipeline stages keep fixed shapes. Remove when Megatron-Bridge joins packs.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/config.py
"""

# pyright: reportAttributeAccessIssue=false

import functools
from collections.abc import Callable
from typing import Any

import torch

from trainer.patches import versions

OF_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")
ENDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
LONGEST = ("max_seqlen_q", "max_seqlen_kv")


def install(packs: int) -> None:
    """Join each `packs` packs, those of a micro batch. A second call has no effect."""
    versions.check(__name__)
    from megatron.bridge.data.packing.gpt_sft import GPTSFTPackedDataset
    from megatron.bridge.training import config, eval, train
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if hasattr(GPTSFTPackedDataset, "packs_apart"):
        return
    GPTSFTPackedDataset.packs_apart = collate = GPTSFTPackedDataset.collate_fn
    GPTSFTPackedDataset.collate_fn = lambda self, batch: joined(collate(self, batch), packs)
    config.ConfigContainer.validate = _with_one_pack(config.ConfigContainer.validate)
    inputs = TransformerLayer.get_layer_static_inputs
    TransformerLayer.get_layer_static_inputs = lambda self, length, packs: inputs(self, length * packs, 1)
    for module in train, eval:
        module.get_forward_backward_func = _of_one_row(module.get_forward_backward_func)


def joined(batch: dict[str, Any], packs: int) -> dict[str, Any]:
    """Join every `packs` neighbouring packs of a batch to one row.

    A pack's lists of ends are filled up with the last end. In the joined lists such ends come last, as in those of one
    pack.
    """
    rows = {name: batch[name].view(-1, packs * batch[name].size(1)) for name in OF_TOKENS}
    rows |= {name: batch[name].view(-1, packs).amax(1, keepdim=True) for name in LONGEST}
    ends = {name: _ends(batch[name], packs) for name in ENDS if name in batch}
    places = ends.get("cu_seqlens_q_padded", ends["cu_seqlens_q"])
    filling = places.diff(dim=1, prepend=places[:, :1] - 1) == 0
    order = filling.sort(dim=1, stable=True).indices
    of_rows = {name: torch.where(filling, one[:, -1:], one).gather(1, order) for name, one in ends.items()}
    return batch | rows | of_rows


def _ends(of_packs: torch.Tensor, packs: int) -> torch.Tensor:
    """Return the ends of the rows of joined packs."""
    ends = of_packs.view(-1, packs, of_packs.size(1))
    last = ends[:, :, -1:]
    ends = ends + last.cumsum(1, dtype=last.dtype) - last
    return torch.cat([ends[:, 0, :1], ends[:, :, 1:].flatten(1)], 1)


def _with_one_pack(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(validate)
    def validate_with_one_pack(self: Any) -> None:
        packs, self.train.micro_batch_size = self.train.micro_batch_size, 1
        validate(self)
        self.train.micro_batch_size = self.validation.eval_micro_batch_size = packs

    return validate_with_one_pack


def _of_one_row(get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that returns the passes of a step: stages exchange one row of all packs of a micro batch."""

    @functools.wraps(get)
    def get_of_one_row(**sizes: Any) -> Any:
        from megatron.core.utils import get_model_config

        passes = get(**sizes)

        def of_one_row(**given: Any) -> Any:
            length = given["micro_batch_size"] * get_model_config(given["model"][0]).seq_length
            return passes(**given | {"micro_batch_size": 1, "seq_length": length, "decoder_seq_length": length})

        return of_one_row

    return get_of_one_row
