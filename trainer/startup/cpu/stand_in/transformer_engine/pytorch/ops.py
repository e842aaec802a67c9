"""The operation fuser. Megatron-Bridge uses its container in annotations that are evaluated at import."""

from torch.nn import Sequential

__all__ = ["Sequential"]
