"""Bytes that lie with a rank's parameters: weights, their copies in FP8, gradients and the optimizer's states.

    weights(run, gpu, parameters, quantized, matrices)  weights, and copies of them in FP8
    state_bytes(run, cut, dense, expert)        gradients and optimizer of so many trained parameters of one rank
    host_bytes(run, cut, dense, expert)         the optimizer's on the host, of one rank
    passing(run, cut, dense, expert, quantized) what lies besides for a moment, while no activations do
    saving(run, cut, dense, expert)             what a rank has on the host while it saves its part of a checkpoint

A parameter takes 2 bytes in bf16, 4 in fp32. A trained one takes 4 more for its gradient, or 2 (optimizer.gradients),
and the optimizer's share: two means of 4 bytes each, or 2 or 1 (optimizer.states), and in bf16 the fp32 weight. The
share is cut over the copies of the parameter by the distributed optimizer: dp * cp of them for dense layers, edp for
experts. Frozen parameters take neither.
A moving mean of the weights (train.ema_decay) takes 4 bytes of each trained parameter, on every rank that has it.

Offloaded, a parameter leaves nothing here. On the host it takes 16 bytes: weight, gradient and two means, all in fp32.

FP8. Transformer Engine makes a copy of each weight in the first microbatch of a step and keeps it; for the gradient of
the input it needs the transposed one too, but where products in FP8 take either layout (Blackwell, one scale for a
tensor). Blocks of 128 x 128 have an fp32 scale, in either copy; those of 32 (mxfp8) one byte. With train.fp8_weights
the copies are all there is, after loading, which writes them from bf16.

A checkpoint holds the optimizer's states by parameter, and for that every rank gets those of its whole buffer on the
host: weight and two means in fp32, and copies of the part that the rank writes
(trainer/patches/checkpoints/exchanged_states.py).

A packed base (model.base) has its codes and scales in their place, also while it is loaded.

Not covered: the padding of gradient buffers, less than 64 numbers per parameter and lcm(dp, 128) per 40M of them; and
that offloading goes by whole weights.
"""

from math import ceil

from conf.planner.hardware import Gpu
from conf.rules import packed_base
from conf.rules.layout import Grid
from conf.rules.packed_base import Format
from conf.schema.run import Run
from conf.schema.training import Train

MEANS = {"fp32": 8, "bf16": 4, "fp8": 2}  # bytes of both
AWAY = 16  # bytes of an offloaded parameter on the host
SAVED = 12  # bytes of the weight and both means in fp32, however they are held


def byte(train: Train) -> int:
    return 4 if train.precision == "fp32" else 2


def copy_bytes(train: Train, gpu: Gpu) -> float:
    """Bytes of the copies of one weight in FP8, for products in both directions."""
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
    """Bytes of weights packed in this format, with those that stay unpacked."""
    return (parameters - quantized) * byte(run.train) + ceil(quantized * form.bytes) + matrices * form.factor_bytes


def state_bytes(run: Run, cut: Grid, dense: int, expert: int) -> tuple[int, int]:
    gradient = 2 if run.optimizer.gradients == "bf16" else 4
    each = MEANS[run.optimizer.states] + (4 if byte(run.train) == 2 else 0)
    means = 4 * (dense + expert) if run.train.ema_decay else 0  # of the weights, which no rank shares with another
    return gradient * (dense + expert), each * shares(run, cut, dense, expert)[0] + means


def host_bytes(run: Run, cut: Grid, dense: int, expert: int) -> int:
    return AWAY * shares(run, cut, dense, expert)[1]


def passing(run: Run, cut: Grid, dense: int, expert: int, quantized: int) -> int:
    here, _ = shares(run, cut, dense, expert)
    # All means in FP8 are unpacked to fp32 for the step, else gradients in bf16 are.
    step = 8 * here if run.optimizer.states == "fp8" else 4 * here if run.optimizer.gradients == "bf16" else 0
    return max(step, quantized * byte(run.train) if run.train.fp8_weights else 0)


def saving(run: Run, cut: Grid, dense: int, expert: int) -> int:
    """The weights that the rank writes; with the optimizer's states, all of its buffers and copies of its part."""
    ways = cut.dp * run.layout.cp, cut.edp
    part = ceil(dense / ways[0]) + ceil(expert / ways[1])
    if not run.checkpoint.save_optimizer:
        return part * byte(run.train)
    if not run.optimizer.distributed:
        return part * (byte(run.train) + SAVED)
    return SAVED * (dense + expert) + part * (byte(run.train) + SAVED)


def shares(run: Run, cut: Grid, dense: int, expert: int) -> tuple[int, int]:
    """Numbers of parameters whose states the optimizer of one rank has, on the GPU and on the host."""
    if not run.optimizer.distributed:
        return dense + expert, 0
    whole = ceil(dense / (cut.dp * run.layout.cp)) + ceil(expert / cut.edp)
    away = int(whole * run.optimizer.offload)
    return whole - away, away
