"""Bytes of a rank's parameters: weights, their copies in FP8, gradients and the optimizer's states.

    weights(run, gpu, parameters, quantized, matrices)  weights, and copies of them in FP8
    state_bytes(run, cut, dense, expert)        gradients and optimizer states of a rank's trained parameters on the GPU
    host_bytes(run, cut, dense, expert)         optimizer states of a rank on the host
    passing(run, cut, dense, expert, quantized) temporary memory at a time without activations
    saving(run, cut, dense, expert)             memory of a rank on the host for copies of its part of a checkpoint

A parameter takes 2 bytes in bf16 and 4 in fp32. A trained parameter takes 4 more bytes for its gradient, or 2
(optimizer.gradients), and the optimizer's states: two means of 4 bytes each, or 2 or 1 (optimizer.states), and in bf16
the fp32 weight. The distributed optimizer divides the states over the copies of the parameter: dp * cp copies for dense
layers, edp for experts. Frozen parameters have neither gradients nor states. A moving mean of the weights
(train.ema_decay) takes 4 bytes for each trained parameter, on every rank that has it.

The states of an offloaded parameter take no memory on the GPU, and 16 bytes on the host: weight, gradient and two
means, all in fp32.

FP8. Transformer Engine makes a copy of each weight in the first microbatch of a step and keeps it. For the gradient of
the input it also needs the transposed copy, unless FP8 products accept both layouts (Blackwell, one scale per tensor).
In each copy, blocks of 128 x 128 have an fp32 scale, blocks of 32 (mxfp8) a scale of one byte. With train.fp8_weights
only the copies remain after loading, which writes them from bf16.

A checkpoint holds the optimizer's states by parameter. Each rank copies only its part of the weights and states to the
host (trainer/patches/checkpoints/divided_states.py), and from the first save on it keeps the memory of these copies
(trainer/training/host_copies.py). The first rank copies the moving means too. Loading takes less.

A packed base (model.base) has only its codes and scales, also while it is loaded.

Not covered: the padding of gradient buffers, less than 64 numbers per parameter and lcm(dp, 128) per 40M of them. Only
whole weights are offloaded, which is not covered either.
"""

from math import ceil

from conf.planner.hardware import Gpu
from conf.rules import packed_base
from conf.rules.layout import Grid
from conf.rules.packed_base import Format
from conf.schema.run import Run
from conf.schema.training import Train

MEANS = {"fp32": 8, "bf16": 4, "fp8": 2}  # bytes of both means
AWAY = 16  # bytes of an offloaded parameter on the host
SAVED = 12  # bytes of the weight and both means in fp32, whatever their precision in training


def byte(train: Train) -> int:
    return 4 if train.precision == "fp32" else 2


def copy_bytes(train: Train, gpu: Gpu) -> float:
    """Return the bytes of the copies of one weight in FP8, for products in both directions."""
    scale = {"blockwise": 4 / 128**2, "mxfp8": 1 / 32}.get(train.fp8 or "", 0.0)
    return (2 if scale or gpu.transposes else 1) * (1 + scale)


def weights(run: Run, gpu: Gpu, parameters: int, quantized: int, matrices: int) -> tuple[int, int]:
    copies = ceil(quantized * copy_bytes(run.train, gpu)) if run.train.fp8 else 0
    if packed := packed_base.format_of(run):
        return packed_bytes(run, packed, parameters, quantized, matrices), 0
    if run.train.fp8_weights:
        return (parameters - quantized) * byte(run.train) + copies, 0
    return parameters * byte(run.train), copies


def packed_bytes(run: Run, form: Format, parameters: int, quantized: int, matrices: int) -> int:
    """Return the bytes of weights packed in this format, including weights that stay unpacked."""
    return (parameters - quantized) * byte(run.train) + ceil(quantized * form.bytes) + matrices * form.factor_bytes


def state_bytes(run: Run, cut: Grid, dense: int, expert: int) -> tuple[int, int]:
    gradient = 2 if run.optimizer.gradients == "bf16" else 4
    each = MEANS[run.optimizer.states] + (4 if byte(run.train) == 2 else 0)
    means = 4 * (dense + expert) if run.train.ema_decay else 0  # mean of the weights, which is not divided over ranks
    return gradient * (dense + expert), each * shares(run, cut, dense, expert)[0] + means


def host_bytes(run: Run, cut: Grid, dense: int, expert: int) -> int:
    return AWAY * shares(run, cut, dense, expert)[1]


def passing(run: Run, cut: Grid, dense: int, expert: int, quantized: int) -> int:
    here, _ = shares(run, cut, dense, expert)
    # For the step, means in FP8 are unpacked to fp32; otherwise gradients in bf16 are.
    step = 8 * here if run.optimizer.states == "fp8" else 4 * here if run.optimizer.gradients == "bf16" else 0
    return max(step, quantized * byte(run.train) if run.train.fp8_weights else 0)


def saving(run: Run, cut: Grid, dense: int, expert: int) -> int:
    """Return the bytes of the rank's part of the weights and, if they are saved, of the optimizer's states."""
    part = ceil(dense / (cut.dp * run.layout.cp)) + ceil(expert / cut.edp)
    means = 4 * (dense + expert) if run.train.ema_decay else 0
    return part * (byte(run.train) + (SAVED if run.checkpoint.save_optimizer else 0)) + means


def shares(run: Run, cut: Grid, dense: int, expert: int) -> tuple[int, int]:
    """Return the numbers of parameters whose states the optimizer of one rank holds on the GPU and on the host."""
    if not run.optimizer.distributed:
        return dense + expert, 0
    whole = ceil(dense / (cut.dp * run.layout.cp)) + ceil(expert / cut.edp)
    away = int(whole * run.optimizer.offload)
    return whole - away, away
