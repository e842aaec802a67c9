"""Patch: resume an offloaded optimizer in its saved state.

1. After a resume, megatron-core's HybridDeviceOptimizer resets the step number of its GPU part to that of the resume
   before every step. Remove when _sync_hdo_param_groups_to_sub_optimizers leaves the step out:
   https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py
2. After loading a checkpoint, Megatron-Bridge overwrites the fp32 weights on the host with the bf16 weights, even if
   the checkpoint contains fp32 weights. Remove when its setup checks whether fp32 weights were loaded:
   https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/setup.py

tests/trainer/megatron/test_precision.py checks both.
"""

# pyright: reportAttributeAccessIssue=false

from trainer.patches import versions


def keep_counting() -> None:
    versions.check(__name__)
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    original = HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers

    def hand_down(self) -> None:
        original(self)
        for group in self.param_groups:
            group.pop("step", None)  # the sub-optimizers have it now, and increase it

    HybridDeviceOptimizer._sync_hdo_param_groups_to_sub_optimizers = hand_down


def keep_resumed_weights() -> None:
    versions.check(__name__)
    from megatron.bridge.training import setup

    setup.sync_hybrid_device_optimizer_fp32_master_copies = lambda optimizer: False
