"""Seconds that one GPU and its host need for the parts of a layer. Data sheets promise less.

    product, preparing, attention, moving       on the GPU
    starting                                    on the host, to start kernels in eager PyTorch without CUDA graphs
    updating                                    the optimizer's step on the GPU and on the host

Shares and seconds were measured on an H200 with 16 cores by benchmarks/gpu/calibrate.py (torch 2.11, TE 2.20; November
2026), on single products, kernels and layers of 256 tokens. GEMM and EACH were also fitted to steps of trainer.trial.
CROWD, RING and CALL were fitted to steps on two and four H200.

Not covered: experts that are not computed in one grouped product; matrix sizes that do not fit a GPU's tiles.
"""

from typing import NamedTuple

from conf.model_facts import ModelFacts
from conf.planner import work
from conf.planner.hardware import Gpu
from conf.planner.memory import HOPPER, Holding, is_one_product
from conf.planner.states import byte
from conf.rules import packed_base
from conf.schema.run import Run
from conf.schema.training import Optimizer, Train

# Share of TFLOPS in one large product. Single products reach 0.68 to 0.79 at 8192 tokens in bf16 and 0.72 in FP8, less
# with scales by block. The time for the bytes is added, but partly overlaps: bf16 and the first two of FP8 are fitted
# to measured steps.
GEMM = {"fp32": 0.75, "bf16": 0.78, "current": 0.80, "delayed": 0.80, "blockwise": 0.58, "mxfp8": 0.58}
# Share of TFLOPS in causal attention over long sequences, forward and backward together, and the number of tokens at
# which the share is half as large.
ATTENTION, ATTENTION_HALF = 0.58, 900
# The same with heads wider than 256, by matrix products (trainer/patches/wide_heads.py): H200, 27 November 2026.
WIDE, WIDE_HEADS = 0.14, 256
ATTENTION_64 = 0.75  # factor of this share at a head width of 64: fewer products for each exponential
DELTA_RULE = 0.12  # share of FLOP/s of a gated delta rule's kernels; a trial of Qwen3-Next was bound by the host
ATTENTION_BACKWARD = 2.5  # flash attention computes 5 products backward, 2 forward
HBM = 0.8  # of bytes/s next to products; copies and sums get 0.88
# Share of bytes/s in kernels that move data, forward and backward. torch compiles an activation to one kernel.
MOVES = {
    "norm": (0.26, 0.31),
    "add": (0.88, 0.88),
    "rotate": (0.72, 0.72),  # one kernel
    "rotate apart": (0.46, 0.31),  # latent attention's
    "permute": (0.35, 0.38),
    "activation": (0.8, 0.8),
    "shared activation": (0.8, 0.8),
    "weighted activation": (0.8, 0.8),  # with the router's probabilities
}
SORTED_ONCE = 0.2  # factor of permuting's bytes, if one rank has all experts in one product
# Share of bytes/s to read codes of a packed base and write its weights: benchmarks/gpu/packed.py.
UNPACK = {"fp8": 0.75, "int4": 0.74, "nvfp4": 0.71, "mxfp4": 0.73}
QUANTIZE = {"current": 0.47, "delayed": 0.6, "blockwise": 0.58, "mxfp8": 0.58}  # current reads twice, to find the scale
KERNEL = 4e-6  # seconds to start and end a product, of any number of experts, or a kernel of quantizing
KERNELS = {"current": 3, "delayed": 1, "blockwise": 1, "mxfp8": 1}  # kernels of quantizing: maximum, scale, copy
LOSS = 10  # bytes per logit of 2 bytes: read twice and written, and once more in the backward pass

# Seconds of the host for one layer, forward and backward, with one rank on the host.
DENSE, MOE, SHARED = (1.0e-3, 1.0e-3), (4.5e-3, 3.2e-3), (0.5e-3, 0.4e-3)  # SHARED: additional, with shared experts
DELTA = (4.4e-3, 7.4e-3)  # additional, with a gated delta net; from a trial of Qwen3-Next on an H100
MOE_FROZEN = (3.0e-3, 2.1e-3)  # if a layer's frozen experts are one product; from trainer.trial
EACH = 0.33e-3  # additional in each direction, for each expert of a rank with separate adapters; from trainer.trial
EACH_AT_ONCE = 0.01e-3  # the same if they are one grouped product
ADAPTER, FP8 = (0.23e-3, 0.15e-3), (0.6e-3, 0.4e-3)  # additional, for each layer with an adapter, and with FP8
RING = (0.17e-3, 0.33e-3)  # additional, for each step of cp's ring: one piece of attention, and its sum
# Slowdown of the host by the number of its ranks; more than 4 were not measured. A rank on a host of 4 H200 took 70 to
# 85 us for each kernel of a step, and 20 us if it was alone. For the same layers, hosts of an H100 took 1.1 to 1.5
# times as long as the host of the calibration.
CROWD = {1: 1.25, 2: 1.7, 4: 2.05}
# Additional seconds of each collective, until the host of the slowest rank has started it too.
CALL = 0.25e-3
# Seconds for the two products of each expert of a rank: forward; backward with trained weights, and with frozen ones.
# In FP8, inputs and gradients are quantized separately for each expert.
EXPERT = {
    "bf16": (35e-6, 83e-6, 30e-6),
    "packed": (11e-6, 0.0, 11e-6),  # all are unpacked at once; from a trial of GLM-4.7 on two H200
    "current": (97e-6, 166e-6, 92e-6),
    "delayed": (70e-6, 130e-6, 66e-6),
    "blockwise": (62e-6, 123e-6, 59e-6),
    "mxfp8": (62e-6, 123e-6, 59e-6),
}
WEIGHT = {"current": 25e-6, "delayed": 10e-6, "blockwise": 10e-6, "mxfp8": 10e-6}  # once a step, to quantize a weight

ADAM = 0.66  # of bytes/s; reads gradient, weight and two means; writes weight, means and bf16 weight
ADDED = 0.58  # of bytes/s; a product reads the fp32 sum of gradients, adds its own and writes the sum
HOST = 0.8  # of the host's bytes/s, in torch's fused AdamW


PACKED = {"attention": "attention", "latent": "attention", "experts": "experts"}  # names in model.pack; else dense
MATRICES = ("attention", "latent", "mlp", "experts", "shared experts", "mtp")  # products with weights of the layers


class Host(NamedTuple):
    """Seconds of the host to start one layer's kernels and collectives."""

    forward: float
    backward: float
    experts: float  # part of forward right after the host has waited for the GPU's count of tokens


def fp8(train: Train, part: str) -> str | None:
    """Return the FP8 recipe of a product; None for adapters, the router and the logits, which stay in bf16."""
    return train.fp8 if part in MATRICES else None


def product(run: Run, gpu: Gpu, one: work.Product, weight: bool = True) -> float:
    """Return the seconds of a matrix product: the sum for computing and for moving its bytes.

    Large products overlap both, which the fitted GEMM takes into account. Without `weight` the bytes of the weight and
    the start of the kernel do not count.
    """
    low, precision = fp8(run.train, one.part), _precision(run, one)
    each = 4 if precision == "fp32" else 1 if low else 2
    size = one.m * (one.k * each + one.n * max(each, 2)) + (one.n * one.k * each if weight else 0)
    computing = one.flops / (gpu.flops("fp8" if low else precision) * GEMM[low or precision])
    return computing + size * one.batch / (gpu.hbm * HBM) + (KERNEL if weight else 0)


def _precision(run: Run, one: work.Product) -> str:
    exact = one.part == "router" or run.train.precision == "fp32"  # routing scores are computed in fp32
    return "fp32" if exact else "bf16"


def preparing(run: Run, gpu: Gpu, one: work.Product) -> tuple[float, float]:
    """Return the seconds to quantize the input in the forward pass, and the gradient in the backward pass.

    If the weight is trained, both are quantized in both layouts. A packed weight is unpacked in both passes.
    """
    packed = packed_base.format_of(run)
    if packed and one.part in MATRICES and PACKED.get(one.part, "dense") in packed_base.parts(run):
        size = one.n * one.k * one.batch * (packed.bytes + byte(run.train))
        seconds = size / (gpu.hbm * UNPACK[run.model.base]) + KERNEL
        return seconds, seconds
    low = fp8(run.train, one.part)
    if not low:
        return 0.0, 0.0
    each, start = (4 if one.trained else 3) * one.batch / (gpu.hbm * QUANTIZE[low]), one.batch * KERNELS[low] * KERNEL
    return one.m * one.k * each + start, one.m * one.n * each + start


def quantizing_weights(run: Run, facts: ModelFacts, gpu: Gpu, held: Holding) -> float:
    """Return the seconds to quantize a rank's weights, once in the first microbatch of each step."""
    low = run.train.fp8
    if not low or run.train.fp8_weights:
        return 0.0
    layers = sum(held.layers.values())
    weights = 4 * layers + 2 * facts.experts // run.layout.ep * (layers - held.layers.get("dense", 0))
    return 4 * held.quantized / (gpu.hbm * QUANTIZE[low]) + weights * WEIGHT[low]


def moving(run: Run, gpu: Gpu, moves: list[work.Move]) -> tuple[float, float]:
    sorted_once = is_one_product(run, gpu) and run.layout.ep * run.layout.etp == 1
    less = {"permute": SORTED_ONCE} if sorted_once else {}
    forward = sum(move.forward * less.get(move.name, 1) / (gpu.hbm * MOVES[move.name][0]) for move in moves)
    return forward, sum(move.backward * less.get(move.name, 1) / (gpu.hbm * MOVES[move.name][1]) for move in moves)


def attention(run: Run, facts: ModelFacts, gpu: Gpu, kind: str) -> float:
    """Return the seconds of attention, or of a gated delta rule, in the forward pass."""
    flops = work.attention(run, facts, kind) / gpu.flops(run.train.precision)
    if facts.delta_of(kind):
        return flops / DELTA_RULE
    if facts.of(kind).head_dim > WIDE_HEADS:
        return flops / WIDE
    length = run.data.seq_length / run.layout.cp  # a ring computes piece by piece
    narrow = ATTENTION_64 if not facts.kv_rank and facts.head_dim <= 64 else 1.0
    share = ATTENTION * narrow * length / (length + ATTENTION_HALF)
    return flops / share


def starting(run: Run, facts: ModelFacts, gpu: Gpu, kind: str) -> Host:
    routed, full = facts.routed(kind), run.adapter.kind == "none"
    found = [0.0, 0.0]
    for more, times in (
        ((MOE_FROZEN if is_one_product(run, gpu) else MOE) if routed else DENSE, facts.blocks_in(kind) / 2),
        (SHARED, routed and facts.shared_ffn > 0),
        (DELTA, facts.delta_of(kind) is not None),
        (ADAPTER, work.adapters(run, facts, kind)),
        (FP8, run.train.fp8 is not None),
        (RING, (run.layout.cp - 1) * facts.mixes(kind)),
    ):
        found = [have + each * times for have, each in zip(found, more, strict=True)]
    crowd = max(more for ranks, more in CROWD.items() if ranks <= run.layout.gpus_per_node)
    calls, back = work.calls(run, facts, kind)
    experts = 0.0
    if routed:
        at_once = gpu.capability == HOPPER and not run.train.fp8
        unpacked = packed_base.format_of(run) and "experts" in packed_base.parts(run)
        once, trained, frozen = EXPERT["packed" if unpacked else run.train.fp8 or "bf16"]
        if is_one_product(run, gpu):
            once = frozen = 0.0
        adapts_experts = not {"linear_fc1", "linear_fc2"}.isdisjoint(run.adapter.names)
        each = not full and run.adapter.experts == "each" and adapts_experts
        alone = (EACH_AT_ONCE if at_once else EACH) if each else 0.0
        local = facts.experts // run.layout.ep
        experts = local * (once + alone)
        found = [found[0] + experts, found[1] + local * ((trained if full else frozen) + alone)]
    return Host(found[0] * crowd + calls * CALL, found[1] * crowd + back * CALL, experts * crowd)


def updating(optimizer: Optimizer, gpu: Gpu, here: float, away: float, held: float, microbatches: int) -> float:
    """Return the seconds of the optimizer's step for `here` parameters on the GPU and `away` parameters on the host.

    They include zeroing and summing the gradients of `held` parameters.
    """
    each = {"fp32": 30, "bf16": 22, "fp8": 58}[optimizer.states]  # means in FP8 are unpacked and packed again
    gradient = 2 if optimizer.gradients == "bf16" else 4
    added = held * (2 * gradient / HBM + 2 * gradient * microbatches / ADDED) / gpu.hbm
    # gradients go down and weights come up while others are computed: each reads and writes 28 bytes on the host
    host = max(away * 4 / gpu.bus, away * 28 / (gpu.host * HOST))
    return max(here * each / (gpu.hbm * ADAM), host) + added
