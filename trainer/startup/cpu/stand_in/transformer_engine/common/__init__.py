"""The part of transformer_engine.common that Megatron imports: the quantisation recipes."""

from transformer_engine.common import recipe  # noqa: F401
