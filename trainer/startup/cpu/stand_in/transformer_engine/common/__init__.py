"""The part of transformer_engine.common that Megatron imports: the quantisation recipes."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
