"""Patch for MiniMax-M2's rotary embeddings: transformers rotates the part of a head given by rotary_dim.

Its class reads only partial_rotary_factor, which the releases do not have, and rotates whole heads
(https://github.com/huggingface/transformers/blob/main/src/transformers/models/minimax_m2/configuration_minimax_m2.py).
Megatron-Bridge and vLLM read rotary_dim. Remove when transformers does.
"""

from trainer.patches import versions


def install() -> None:
    """Make the configuration use rotary_dim for the rotated share of a head."""
    versions.check(__name__)
    from transformers import MiniMaxM2Config

    if "__post_init__" in vars(MiniMaxM2Config):
        return
    inherited = MiniMaxM2Config.__post_init__

    def read_rotary_dim(self, **kwargs) -> None:
        if width := kwargs.get("rotary_dim"):
            kwargs.setdefault("partial_rotary_factor", width / self.head_dim)
        inherited(self, **kwargs)

    MiniMaxM2Config.__post_init__ = read_rotary_dim
