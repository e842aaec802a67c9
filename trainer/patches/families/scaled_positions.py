"""Patch for rotary positions that are scaled (YaRN, gpt-oss): Transformer Engine's kernel, and one for the scale.

Megatron-core turns with thirteen kernels each whatever is scaled, as Transformer Engine's kernel scales nothing; but
both of its sums are scaled alike, so that turning and then scaling is the same. What is turned by part, interleaved or
on a CPU stays as it is. Packed rows come here as well (trainer/patches/packed_positions.py).
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/models/common/embeddings/rope_utils.py
Can go when apply_rotary_pos_emb takes the fused kernel for an mscale.
"""

# pyright: reportAttributeAccessIssue=false

import functools

from trainer.patches import versions

WRITTEN_FOR = {"megatron-core": ("0.19.2",)}


def install() -> None:
    """Have positions turned so, in this process."""
    versions.check(__name__, WRITTEN_FOR)
    from megatron.core.models.common.embeddings import rope_utils

    usual = rope_utils._apply_rotary_pos_emb_bshd
    if getattr(usual, "scales_after", False):
        return

    @functools.wraps(usual)
    def turned(t, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0, **others):
        fused, whole = rope_utils.fused_apply_rotary_pos_emb, freqs.shape[-1] == t.shape[-1]
        if fused is None or not t.is_cuda or not whole or rotary_interleaved or mla_rotary_interleaved or others:
            return usual(t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, **others)
        found = fused(t, freqs.float())
        return found if mscale == 1.0 else found * mscale

    turned.scales_after = True
    rope_utils._apply_rotary_pos_emb_bshd = turned
