"""The modules of transformer_engine.pytorch that Megatron builds language models from."""

from transformer_engine.pytorch import distributed, fp8, ops, optimizers, router  # noqa: F401
from transformer_engine.pytorch.attention import DotProductAttention  # noqa: F401
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init  # noqa: F401
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear  # noqa: F401
from transformer_engine.pytorch.norm import LayerNorm, RMSNorm  # noqa: F401
