"""Random states and recomputation, as far as Megatron imports them without a GPU."""


class CudaRNGStatesTracker:
    """Base of Megatron's TECudaRNGStatesTracker, which only CUDA graphs use."""


activation_recompute_forward = None  # only called with FP8
