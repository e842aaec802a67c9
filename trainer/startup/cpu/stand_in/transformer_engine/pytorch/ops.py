"""The operation fuser. Megatron-Bridge uses its container in annotations that are evaluated at import."""

from torch.nn import Sequential  # noqa: F401
