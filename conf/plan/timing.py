"""How long a step takes, and the run, and what it costs.

    timing(run, facts, gpu) -> Timing

Each matrix product takes its FLOPs at a share of the data sheet's rate and its bytes at a share of memory's; all else
that a layer does takes its bytes; a layer takes no less than the time its host needs to start its kernels. A frozen
weight has no gradient of its own, so its layer costs 4 FLOPs a weight and token instead of 6, and recompute adds 2.

Collectives of a layer are not hidden behind computing (Megatron's defaults), but for cp's ring, which attention hides.
Where a group of ranks lies follows from core's order of ranks, tp-cp-ep-dp-pp, tp innermost: a group whose ranks are
`stride` apart has domain / stride of them on one NVLink, and the rest of its traffic goes over the network.

Not covered: loading of data, validation, checkpoints, stragglers, FP8.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from conf.facts import ModelFacts
from conf.layout import grid
from conf.plan import work
from conf.plan.activations import kinds, tokens
from conf.plan.hardware import (
    ALL_TO_ALL,
    ATTENTION,
    ATTENTION_64,
    ATTENTION_HALF,
    GEMM,
    HBM,
    LINK,
    NETWORK,
    Gpu,
)
from conf.plan.memory import Holding, holdings
from conf.schema import Run

# Seconds of CPU to start one layer's forward kernels from eager PyTorch: a module of Transformer Engine takes 0.1 to
# 0.2 ms of Python, attention 0.3; MoE layers add routing and permutations, and wait for the GPU to count tokens.
HOST_DENSE, HOST_MOE = 1.0e-3, 3.0e-3
ATTENTION_BACKWARD = 2.5  # flash attention computes 5 products backward, 2 forward
MOVED_BACKWARD = 1.6  # gradients of element-wise kernels read and write more than the kernels: 3 and 2 for a norm
LATENCY = 20e-6  # s per collective and microbatch, of NCCL's kernel and its peers' arrival
OPTIMIZER = 30  # bytes read and written per parameter of a rank's share: gradient, parameters, two moments
LOSS = 28  # bytes per logit: cast, maximum, exponent, sum, quotient, and the gradient's way back
LOW, HIGH = 0.8, 1.3  # of the likely time: rates differ so much by clocks, drivers and shapes


@dataclass(frozen=True)
class Timing:
    flops: dict[str, float]  # of a step over all GPUs, by part of the model; recompute by itself
    communication: dict[str, tuple[float, float]]  # by dimension: bytes that a GPU sends in a step, and seconds
    bubble: float  # share of a step that a stage waits for others
    low: float  # seconds of a step
    likely: float
    high: float
    tokens_per_second: float  # and GPU
    tflops: float  # of model FLOPs, without recompute, per second and GPU; in units of 1e12
    hours: float
    cost: float | None  # USD; None where the GPU has no price


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and one microbatch on one rank."""

    forward: float
    backward: float
    again: float  # recomputed
    flops: dict[str, float]
    sent: dict[str, float]  # bytes over each dimension, forward, backward and again
    waited: dict[str, float]  # seconds


@dataclass(frozen=True)
class Step:
    """Seconds that the pipeline computes, fills and drains, reduces gradients and updates weights."""

    steady: float
    fill: float
    reduced: float
    updated: float
    sent: float  # bytes of the reduction
    busiest: Holding  # of the pipeline's ranks

    @property
    def seconds(self) -> float:
        return self.steady + self.fill + self.reduced + self.updated


def step(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> Step:
    """Takes a legal layout. memo keeps what steps of the same run at other layouts share."""
    layout, layers, held = run.layout, _layers(run, facts, gpu, memo), holdings(run, facts, memo)
    each = {kind: one.forward + one.backward + one.again for kind, one in layers.items()}
    hop, _ = _hop(run, facts, gpu)
    times = [sum(each[kind] * n for kind, n in one.layers.items()) + one.output * each["loss"] + hop for one in held]
    slowest = max(times)
    sent, reduced, updated = _reduction(run, gpu, held)
    return Step(
        steady=slowest * grid(layout, run.train).microbatches,
        fill=(sum(times) - slowest) / (layout.vpp or 1),  # until the first microbatch has been through all other stages
        reduced=reduced,
        updated=updated,
        sent=sent,
        busiest=held[times.index(slowest)],
    )


def timing(run: Run, facts: ModelFacts, gpu: Gpu) -> Timing:
    """Takes a legal layout."""
    memo: dict[Any, Any] = {}
    layout, one, layers = run.layout, step(run, facts, gpu, memo), _layers(run, facts, gpu, memo)
    microbatches, seconds = grid(layout, run.train).microbatches, one.seconds
    communication = dict.fromkeys(("tp", "cp", "ep", "etp"), (0.0, 0.0))
    for kind, n in one.busiest.layers.items():
        for dim, (size, waited) in communication.items():
            more = n * microbatches
            sent, time = layers[kind].sent.get(dim, 0) * more, layers[kind].waited.get(dim, 0) * more
            communication[dim] = (size + sent, waited + time)
    hop, hop_bytes = _hop(run, facts, gpu)
    communication |= {"pp": (hop_bytes * microbatches, hop * microbatches), "dp": (one.sent, one.reduced)}
    flops: dict[str, float] = {}
    for held in holdings(run, facts, memo):
        for kind, n in [*held.layers.items(), ("loss", int(held.output))]:
            for part, count in layers[kind].flops.items():
                flops[part] = flops.get(part, 0.0) + count * n * microbatches * layout.world / layout.pp
    steps = min(run.train.steps, run.train.stop_after or run.train.steps)
    hours = seconds * steps / 3600
    return Timing(
        flops=flops,
        communication={dim: pair for dim, pair in communication.items() if pair[0]},
        bubble=one.fill / (one.steady + one.fill),
        low=seconds * LOW,
        likely=seconds,
        high=seconds * HIGH,
        tokens_per_second=run.train.global_batch * run.data.seq_length / seconds / layout.world,
        tflops=(sum(flops.values()) - flops["recompute"]) / seconds / layout.world / 1e12,
        hours=hours,
        cost=None if gpu.price is None else gpu.price * layout.world * hours,
    )


def _layers(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> dict[str, Layer]:
    layout, train = run.layout, run.train
    key = ("layers", layout.tp, layout.cp, layout.ep, layout.etp, layout.sp, train.micro_batch, train.recompute)
    if key not in memo:
        memo[key] = {kind: layer(run, facts, gpu, kind) for kind in kinds(facts)}
        memo[key]["loss"] = _loss(run, facts, gpu)
    return memo[key]


def layer(run: Run, facts: ModelFacts, gpu: Gpu, kind: str) -> Layer:
    """One layer and one microbatch."""
    products = work.products(run, facts, kind)
    rate = gpu.tflops[run.train.precision] * 1e12
    scores, moved = work.attention(run, facts), work.moved(run, facts, kind) / (gpu.hbm * HBM)
    attention = scores / (rate * _attention_share(run, facts))
    sent, waited = _collectives(run, facts, gpu, kind, attention)
    uneven = _uneven(run, facts)
    times = {
        product: _product(run, gpu, product) * (uneven if product.part == "experts" else 1) for product in products
    }
    matrices = sum(times[product] for product in products)
    weights = sum(times[product] for product in products if product.trained)
    host = HOST_MOE if kind != "dense" and facts.experts else HOST_DENSE
    talk = sum(waited.values())
    forward = max(matrices + attention + moved, host) + talk
    backward = max(matrices + weights + ATTENTION_BACKWARD * attention + MOVED_BACKWARD * moved, 2 * host) + talk
    share = _share_again(run, products, scores)
    flops = {"scores": scores * (1 + ATTENTION_BACKWARD)}
    for product in products:
        flops[product.part] = flops.get(product.part, 0) + product.flops * (3 if product.trained else 2)
    again = sum(product.flops for product in products) + scores
    flops["recompute"] = again * share
    # whole layers talk again; of single modules, those that are recomputed here do not
    passes = 3 if run.train.recompute == "full" or "moe" in run.train.recompute_modules else 2
    return Layer(
        forward=forward,
        backward=backward,
        again=share * (forward if passes == 3 else forward - talk),
        flops=flops,
        sent={dim: count * passes for dim, count in sent.items()},
        waited={dim: seconds * passes for dim, seconds in waited.items()},
    )


def _share_again(run: Run, products: list[work.Product], scores: float) -> float:
    """Of a layer's forward pass, what is computed again."""
    if run.train.recompute == "full":
        return 1.0
    modules, whole = run.train.recompute_modules, sum(product.flops for product in products) + scores
    parts = {"mlp": ("mlp",), "moe": ("router", "experts", "shared experts"), "shared_experts": ("shared experts",)}
    named = {part for module in modules for part in parts.get(module, ())}
    again = sum(product.flops for product in products if product.part in named)
    again += scores if "core_attn" in modules else 0
    # norms, activation functions and MLA's projections: a few percent of a layer's time
    return again / whole + 0.03 * len(set(modules) & {"layernorm", "moe_act", "mla_up_proj"})


def _attention_share(run: Run, facts: ModelFacts) -> float:
    """Of the data sheet's rate."""
    length = run.data.seq_length / run.layout.cp  # a ring computes piece by piece
    narrow = ATTENTION_64 if not facts.kv_rank and facts.head_dim <= 64 else 1.0
    return ATTENTION * narrow * length / (length + ATTENTION_HALF)


def _uneven(run: Run, facts: ModelFacts) -> float:
    t = tokens(run, facts)
    return t.busiest / t.routed if t.routed else 1.0


def _product(run: Run, gpu: Gpu, product: work.Product) -> float:
    """Seconds: computing, then bytes; a large product hides the one behind the other, a small one nothing."""
    precision = "fp32" if product.part == "router" else run.train.precision  # routing scores are computed in fp32
    m, n, k = product.m, product.n, product.k
    size = (m * k + k * n + m * n) * product.batch * (4 if precision == "fp32" else 2)
    return product.flops / (gpu.tflops[precision] * 1e12 * GEMM) + size / (gpu.hbm * HBM)


def _loss(run: Run, facts: ModelFacts, gpu: Gpu) -> Layer:
    products = work.output(run, facts)
    once = sum(_product(run, gpu, product) for product in products)
    passes = sum(_product(run, gpu, product) * (2 if product.trained else 1) for product in products)
    logits = sum(product.m * product.n for product in products)
    flops = sum(product.flops * (3 if product.trained else 2) for product in products)
    return Layer(once + logits * LOSS / (gpu.hbm * HBM), passes, 0.0, {"logits": flops}, {}, {})


def _collectives(
    run: Run, facts: ModelFacts, gpu: Gpu, kind: str, attention: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a rank sends in one pass of a layer, and seconds that it waits for them."""
    layout, sent, waited = run.layout, {}, {}
    strides = {"tp": 1, "etp": 1, "cp": layout.tp, "ep": layout.etp}
    for dim, size in work.exchanged(run, facts, kind).items():
        ranks = getattr(layout, dim)
        if ranks == 1 or not size:
            continue
        if dim == "ep":
            seconds, sent[dim] = _all_to_all(gpu, size, ranks, strides[dim]), size * (ranks - 1) / ranks
            waited[dim] = seconds * _uneven(run, facts) + 2 * LATENCY
        elif dim == "cp":
            sent[dim] = size
            inside = strides[dim] * ranks <= gpu.joined
            ring = size / (gpu.link * LINK if inside else gpu.network * NETWORK)
            waited[dim] = max(0.0, ring - attention) + LATENCY * (ranks - 1)
        else:
            sent[dim] = size * (ranks - 1) / ranks
            waited[dim] = gathered(gpu, size, ranks, strides[dim]) + 4 * LATENCY
    return sent, waited


def gathered(gpu: Gpu, size: float, ranks: int, stride: int) -> float:
    """Seconds to gather `size` bytes, or to reduce and scatter them, in rings over every link at once."""
    here = max(1, min(ranks, gpu.joined // stride))
    away = ceil(ranks / here)
    inside = size * (ranks - 1) / ranks / (gpu.link * LINK) if here > 1 else 0.0
    return max(inside, size * (away - 1) / away / (here * gpu.network * NETWORK))


def _all_to_all(gpu: Gpu, size: float, ranks: int, stride: int) -> float:
    here = max(1, min(ranks, gpu.joined // stride))
    inside = size * (here - 1) / ranks / (gpu.link * ALL_TO_ALL)
    return max(inside, size * (ranks - here) / ranks / (gpu.network * ALL_TO_ALL))


def _hop(run: Run, facts: ModelFacts, gpu: Gpu) -> tuple[float, float]:
    """Seconds and bytes of a microbatch between stages, there and back, for each virtual stage."""
    layout = run.layout
    if layout.pp == 1:
        return 0.0, 0.0
    t = tokens(run, facts)
    size = t.local * facts.hidden * t.byte
    rate = gpu.link * LINK if layout.world <= gpu.joined else gpu.network * NETWORK
    return 2 * (layout.vpp or 1) * (size / rate + LATENCY), 2.0 * (layout.vpp or 1) * size


def _reduction(run: Run, gpu: Gpu, held: list[Holding]) -> tuple[float, float, float]:
    """Once a step: bytes that the fullest rank sends over its copies, the seconds, and those of the optimizer."""
    layout, cut = run.layout, grid(run.layout, run.train)
    byte = 4 if run.train.precision == "fp32" else 2
    most = (0.0, 0.0, 0.0)
    for dense, expert in {holding.trained for holding in held}:
        sent = seconds = update = 0.0
        copies = ((dense, cut.dp * layout.cp, layout.tp), (expert, cut.edp, layout.ep * layout.etp))
        for count, group, stride in copies:
            # gradients are scattered in fp32 and weights gathered; without the distributed optimizer gradients are both
            size = count * (4 + (byte if run.optimizer.distributed else 4))
            if group > 1:
                sent += size * (group - 1) / group
                seconds += gathered(gpu, size, group, stride) + LATENCY
            share = count / group if run.optimizer.distributed else count
            update += (share * OPTIMIZER + count * (8 + 10 * cut.microbatches)) / (gpu.hbm * HBM)
        most = max(most, (sent, seconds, update), key=lambda figures: figures[1] + figures[2])
    return most
