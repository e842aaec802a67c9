"""Megatron's settings for FP8, for the types of the optimizer's states, and for its offloading.

The rules are in conf/rules/precision.py.

Layers compute in FP8 by Megatron-Bridge's recipes, with one difference: weights are kept in FP8 only if
train.fp8_weights is set. The recipes do it always, for trained weights too.

Optimizer: core's precision-aware optimizer can keep 16 bits of the fp32 weight next to the bf16 weight, but a
checkpoint that can be resumed at any layout does not restore them; so the whole fp32 weight is kept. Offloading without
the precision-aware optimizer leaves the fp32 weights on the GPU and cannot resume from such a checkpoint, so offloading
always uses it.
"""

# pyright: reportAttributeAccessIssue=false

from typing import Any

from conf.rules.precision import beyond_a_cpu
from conf.schema.run import Run
from contract.faults import Fault
from trainer.patches import offloading
from trainer.startup import device

RECIPES = {
    None: "bf16_mixed",
    "current": "bf16_with_fp8_current_scaling_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}


def mixed_precision(run: Run):
    """Return Bridge's settings of mixed precision, which it copies to model, optimizer and ddp; None for fp32."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    train, optimizer = run.train, run.optimizer
    if train.precision == "fp32":
        return None
    settings = get_mixed_precision_config("fp16_mixed" if train.precision == "fp16" else RECIPES[train.fp8])
    if train.precision == "fp16":
        # Halve the scale at every overflow. Core's defaults wait for a second one (hysteresis) and begin at 2 ** 32.
        settings.initial_loss_scale, settings.min_loss_scale = train.loss_scale, 1.0
        settings.loss_scale_window, settings.hysteresis = 1000.0, 1
    settings.fp8_param_gather = train.fp8_weights  # the config sets fp8_param to the same
    settings.reuse_grad_buf_for_mxfp8_param_ag = False
    settings.grad_reduce_in_fp32 = optimizer.gradients == "fp32"
    if optimizer.states == "fp8" and not train.fp8:
        # Bridge sets it even without FP8, and core then loads FP8 states without their scale.
        settings.fp8_recipe = None
    return settings


def dtype(precision: str):
    """Return the torch type of weights and activations."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def optimizer_settings(run: Run) -> dict[str, Any]:
    """Return the settings of Megatron's OptimizerConfig that depend on states and offloading."""
    import torch

    optimizer = run.optimizer
    if optimizer.states == "fp32" and not optimizer.offload:
        return {}
    # megatron-core represents FP8 states as uint8
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}[optimizer.states]
    settings = {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
        "exp_avg_dtype": kept,
        "exp_avg_sq_dtype": kept,
        "main_grads_dtype": torch.float32 if optimizer.gradients == "fp32" else torch.bfloat16,
    }
    if not optimizer.offload:
        return settings
    return settings | {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": optimizer.offload,
        "overlap_cpu_optimizer_d2h_h2d": True,  # copy a weight to the GPU while the next is computed
    }


def prepare(run: Run, resumed: bool) -> None:
    """Raise a Fault for settings that this machine cannot run; install fixes for Megatron's offloading."""
    if not device.has_gpu() and (unsupported := beyond_a_cpu(run)):
        raise Fault(
            "\n".join(f"{key}: {value} needs a GPU, and this host has none; {hint}" for key, value, hint in unsupported)
        )
    if not run.optimizer.offload:
        return
    if not device.has_gpu():
        from trainer.startup.cpu import offload

        offload.install()
    offloading.keep_counting()
    if resumed and run.checkpoint.save_optimizer:
        offloading.keep_resumed_weights()
