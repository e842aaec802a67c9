"""Transformer Engine's modules in plain PyTorch, for hosts without a GPU.

The parent folder is put first on sys.path (trainer/startup/device.py), so megatron-core and Megatron-Bridge import
these modules instead of the real ones. Names, parameters, attributes and checkpoint keys are those of the real package:
the module tree that Megatron builds, its adapters and its checkpoints are the same with both.

Not covered: FP8 and FP4, user buffers, CUDA graphs, and all fused kernels. Megatron imports those in `try` blocks and
works without them; trainer/megatron/recipe.py turns off the fusions that need them.
"""

from importlib.metadata import version

from transformer_engine import common, pytorch  # noqa: F401

__version__ = version("transformer-engine")
