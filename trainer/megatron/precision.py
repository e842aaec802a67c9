"""Settings of Megatron for FP8, for the types of the optimizer's states, and for its offloading.

The rules are in conf/rules/precision.py.

Layers compute in FP8 by Megatron-Bridge's own recipes, but that weights are kept in FP8 only where train.fp8_weights
says so: the recipes do it unasked, for trained weights as well.

The optimizer. Core's precision-aware one keeps the fp32 weight as 16 bits beside the bf16 weight, which a checkpoint
that can be resumed at any layout does not bring back: the whole fp32 weight is kept. Offloading without the
precision-aware one leaves the fp32 weights on the GPU, and cannot be resumed from such a checkpoint: it comes with it.
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
    """Bridge's settings of mixed precision; None for fp32."""
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    train, optimizer = run.train, run.optimizer
    if train.precision == "fp32":
        return None
    found = get_mixed_precision_config("fp16_mixed" if train.precision == "fp16" else RECIPES[train.fp8])
    if train.precision == "fp16":
        for key, value in loss_scaling(run).items():
            setattr(found, key, value)  # Bridge copies them to the optimizer's settings
    found.fp8_param_gather = train.fp8_weights  # the config sets fp8_param to the same
    found.reuse_grad_buf_for_mxfp8_param_ag = False
    found.grad_reduce_in_fp32 = optimizer.gradients == "fp32"
    if optimizer.states == "fp8" and not train.fp8:
        # named even where there is no FP8, and core then loads states in FP8 without their scale
        found.fp8_recipe = None
    return found


def dtype(precision: str):
    """Type of weights and activations, as torch has it."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def loss_scaling(run: Run) -> dict[str, Any]:
    """Settings of core's loss scaling.

    It halves the scale by every overflow; core's own way waits for a second one (hysteresis), and begins at 2 ** 32.
    """
    if run.train.precision != "fp16":
        return {}
    return {
        "initial_loss_scale": run.train.loss_scale,
        "min_loss_scale": 1.0,
        "loss_scale_window": 1000.0,
        "hysteresis": 1,
    }


def optimizer_settings(run: Run) -> dict[str, Any]:
    """Settings of Megatron's OptimizerConfig besides the ordinary ones."""
    import torch

    optimizer = run.optimizer
    if optimizer.states == "fp32" and not optimizer.offload:
        return {}
    # FP8 has no type of its own there
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.uint8}[optimizer.states]
    found = {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
        "exp_avg_dtype": kept,
        "exp_avg_sq_dtype": kept,
        "main_grads_dtype": torch.float32 if optimizer.gradients == "fp32" else torch.bfloat16,
    }
    if not optimizer.offload:
        return found
    return found | {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": optimizer.offload,
        "overlap_cpu_optimizer_d2h_h2d": True,  # a weight goes up while the next is computed
    }


def prepare(run: Run, resumed: bool) -> None:
    """Refuse settings that this machine cannot do, and repair those that Megatron gets wrong."""
    if not device.has_gpu() and (missing := beyond_a_cpu(run)):
        raise Fault(
            "\n".join(f"{key}: {value} needs a GPU, and this host has none; {usual}" for key, value, usual in missing)
        )
    if not run.optimizer.offload:
        return
    if not device.has_gpu():
        from trainer.startup.cpu import offload

        offload.install()
    offloading.keep_counting()
    if resumed and run.checkpoint.save_optimizer:
        offloading.keep_resumed_weights()
