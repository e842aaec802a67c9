"""Random states and recomputation, as far as Megatron imports them without a GPU."""

from contextlib import contextmanager


class CudaRNGStatesTracker:
    """Base of Megatron's TECudaRNGStatesTracker, which only CUDA graphs use."""


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False):
    yield
