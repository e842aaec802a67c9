"""Patches for a packed frozen base: its layers are built without memory, and loaded by another function.

In bf16, GLM-4.7's base would not fit in memory; packed it does. megatron-core puts Transformer Engine's layers on the
current device, or a whole model on meta
(https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/extensions/transformer_engine.py). Megatron-Bridge loads
the base below adapters itself
(https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/setup.py). Remove when Bridge
takes a function that loads the base.
"""

# pyright: reportAttributeAccessIssue=false

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.faults import Fault
from trainer.patches import versions

FUSED = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"  # Transformer Engine's


def build_without_memory() -> Callable[[], None]:
    """Build Transformer Engine's layers on meta from now on. Return the function that ends this."""
    versions.check(__name__)
    if (fused := os.environ.get(FUSED, "0")) != "0":
        raise Fault(f"{FUSED}: {fused} keeps experts' weights unpacked, which model.base excludes; unset it")
    from megatron.core.extensions import transformer_engine as extension

    usual = extension._get_extra_te_kwargs
    extension._get_extra_te_kwargs = lambda config: usual(config) | {"device": "meta"}

    def end() -> None:
        extension._get_extra_te_kwargs = usual

    return end


def load_by(load: Callable[[list], None], folder: Path) -> None:
    """Load the base in this folder by `load` instead of Bridge's function; `load` gets the chunks of the model."""
    versions.check(__name__)
    from megatron.bridge.training import setup

    usual = setup._load_checkpoint_from_path

    def chosen(load_dir: str, state: Any, model: list, *args: Any, **kwargs: Any) -> tuple[int, int]:
        if Path(load_dir) != folder:
            return usual(load_dir, state, model, *args, **kwargs)
        load(model)
        return 0, 0

    setup._load_checkpoint_from_path = chosen
