"""Transformer Engine's modules in plain PyTorch, for hosts without a GPU.

The folder above this one goes first on sys.path (trainer/startup/device.py), so megatron-core and Megatron-Bridge
import these modules where they would import the real ones. Names, parameters, attributes and checkpoint keys are those
of the real package: the module tree that Megatron builds, its adapters and its checkpoints are the same on both.

Not covered: FP8 and FP4, user buffers, CUDA graphs, and every fused kernel. Megatron imports those in `try` blocks
and does without; trainer/megatron/recipe.py turns off the fusions that would ask for them.
"""

from importlib.metadata import version

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = version("transformer-engine")
