"""Patch for scaled rotary positions (YaRN, gpt-oss): Transformer Engine's kernel, and one for the scale.

Megatron-core rotates with thirteen kernels if positions are scaled, because Transformer Engine's kernel does not scale.
The scale applies to the whole result, so it can be multiplied after the rotation. Partial and interleaved rotations,
and those on a CPU, stay unchanged. Packed rows use this too (trainer/patches/packed_positions.py). Remove when
apply_rotary_pos_emb uses the fused kernel with an mscale.
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/models/common/embeddings/rope_utils.py
"""

# pyright: reportAttributeAccessIssue=false

import functools

from trainer.patches import versions


def install() -> None:
    """Replace the rotation in this process."""
    versions.check(__name__)
    from megatron.core.models.common.embeddings import rope_utils

    usual = rope_utils._apply_rotary_pos_emb_bshd
    if getattr(usual, "scales_after", False):
        return

    @functools.wraps(usual)
    def rotate(t, freqs, rotary_interleaved=False, mla_rotary_interleaved=False, mscale=1.0, **others):
        fused, whole = rope_utils.fused_apply_rotary_pos_emb, freqs.shape[-1] == t.shape[-1]
        if fused is None or not t.is_cuda or not whole or rotary_interleaved or mla_rotary_interleaved or others:
            return usual(t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, **others)
        rotated = fused(t, freqs.float())
        return rotated if mscale == 1.0 else rotated * mscale

    rotate.scales_after = True
    rope_utils._apply_rotary_pos_emb_bshd = rotate
