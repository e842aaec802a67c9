"""Duration of a step and of a run, and the price.

    timing(run, facts, gpu) -> Timing
    on_cpu(run, facts, gpu) -> float           seconds of a step on this host's CPU
    asking(run, facts, gpu, rows) -> float     seconds of a reference model to score rows

The time of a matrix product is its FLOPs at a share of the data sheet's rate, plus its bytes at a share of the memory's
rate. The time of everything else in a layer is its bytes. A layer takes at least the time that its host needs to start
its kernels and collectives. So do its experts, as the host first waits for the count of their tokens
(conf/planner/rates.py). A frozen weight has no gradient: its layer needs 4 FLOPs per weight and token instead of 6.
Recompute adds 2.

Collectives of a layer do not overlap with computing (Megatron's defaults), except cp's ring, which attention hides
(conf/planner/traffic.py).

Not covered: loading of data, validation, checkpoints, stragglers.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Any

from conf.model_facts import ModelFacts
from conf.planner import rates, work
from conf.planner.activations import kinds
from conf.planner.hardware import Gpu, cpu_flops
from conf.planner.memory import Holding, holdings
from conf.planner.states import byte, shares
from conf.planner.traffic import LATENCY, collectives, gathered, hop, uneven
from conf.rules import objectives, schedule
from conf.rules.layout import grid
from conf.schema.run import Layout, Run
from conf.schema.training import Train

# On a CPU, a step took 2 times as long as its products with 0.5B parameters, and 3 times with 0.9M.
OF_PRODUCT, LOW_ON_CPU, HIGH_ON_CPU = 0.5, 0.5, 2.0
LOW, HIGH = 0.8, 1.3  # factors of the likely time, as rates depend on clocks, drivers and shapes


@dataclass(frozen=True)
class Timing:
    flops: dict[str, float]  # of a step over all GPUs, by part of the model; recompute counts as a part
    communication: dict[str, tuple[float, float]]  # by dimension: bytes that a GPU sends in a step, and seconds
    bubble: float  # share of a step in which a stage waits for others
    low: float  # seconds of a step
    likely: float
    high: float
    tokens_per_second: float  # per GPU
    tflops: float  # 1e12 model FLOPs per second and GPU, without recompute
    hours: float | None  # None if the steps depend on unknown data
    cost: float | None  # USD; None if the hours or the price of the GPU are unknown


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and one microbatch on one rank."""

    forward: float
    backward: float
    again: float  # recompute
    flops: dict[str, float]
    sent: dict[str, float]  # bytes by dimension, of the forward pass, the backward pass and recompute
    waited: dict[str, float]  # seconds by dimension

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.again


@dataclass(frozen=True)
class Step:
    """Seconds of a step: the pipeline computes, fills and drains; then gradients are reduced and weights updated."""

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
    """Return the time of a step of a legal layout. `memo` keeps values that other layouts share, on any GPU."""
    layout, layers, held = run.layout, _layers(run, facts, gpu, memo), holdings(run, facts, memo)
    between, _ = hop(run, facts, gpu)
    first, last = _ends(run, facts, gpu, memo)
    times = [
        sum(layers[kind].seconds * n for kind, n in one.layers.items())
        + (layers["loss"].seconds + last if one.output else 0)
        + (first if one.rank == 0 else 0)
        + between
        for one in held
    ]
    slowest = max(times)
    sent, reduced, updated = _reduction(run, gpu, held)
    updated += max(rates.quantizing_weights(run, facts, gpu, one) for one in held)
    return Step(
        steady=slowest * grid(layout, run.train).microbatches,
        fill=(sum(times) - slowest) / (layout.vpp or 1),  # until the first microbatch has passed all other stages
        reduced=reduced,
        updated=updated,
        sent=sent,
        busiest=held[times.index(slowest)],
    )


def least(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> float:
    """Return a lower bound for the seconds of a step of a legal layout. It costs a hundredth of the work of `step`.

    It counts matrix products and other kernels, shared evenly by all ranks, and the hosts' time to start kernels.
    """
    layout, train = run.layout, run.train
    if ("floor", gpu.name) not in memo:
        alone = run.changed(layout=dict(Layout()), train={"micro_batch": 1})
        memo["floor", gpu.name] = {kind: _alone(alone, facts, gpu, kind) for kind in kinds(facts)}
    again = 1 + recomputed(run, facts)
    key = ("least", gpu.name, layout.tp, layout.cp, layout.ep, layout.etp, train.micro_batch, again)
    if key not in memo:
        memo[key] = _least_of_layers(run, facts, gpu, again, memo)
    filling = (layout.pp - 1) / (layout.vpp or 1)
    return memo[key] / layout.pp * (grid(layout, train).microbatches + filling)


def _least_of_layers(run: Run, facts: ModelFacts, gpu: Gpu, again: float, memo: dict[Any, Any]) -> float:
    """Return a lower bound for the seconds of all layers and one microbatch."""
    layout, total = run.layout, 0.0
    key = ("starting", gpu.name, layout.tp, layout.cp, layout.ep, layout.etp)
    if key not in memo:
        memo[key] = {kind: rates.starting(run, facts, gpu, kind) for kind in kinds(facts)}
    share = run.train.micro_batch / (layout.tp * layout.cp)
    for kind, count in Counter(facts.kinds).items():
        (forward, backward), host = memo["floor", gpu.name][kind], memo[key][kind]
        total += count * (again * max(forward * share, host.forward) + max(backward * share, host.backward))
    return total


def _alone(run: Run, facts: ModelFacts, gpu: Gpu, kind: str) -> tuple[float, float]:
    """Return the least seconds of one layer on a single rank, forward and backward, without reading its weights."""
    products = work.products(run, facts, kind)
    found = [(one, rates.product(run, gpu, one, weight=False)) for one in products]
    scores = work.attention(run, facts, kind) / (gpu.flops(run.train.precision) * rates.ATTENTION)
    unpadded = run.changed(train={"fp8": None})  # other ranks pad the tokens of fewer experts
    moved, moved_back = rates.moving(unpadded, gpu, work.moved(unpadded, facts, kind, products))
    backward = sum(seconds * (1 + one.trained) for one, seconds in found) + rates.ATTENTION_BACKWARD * scores
    return sum(seconds for _, seconds in found) + scores + moved, backward + moved_back


def timing(run: Run, facts: ModelFacts, gpu: Gpu) -> Timing:
    """Return time and price of a run with a legal layout."""
    memo: dict[Any, Any] = {}
    layout, one, layers = run.layout, step(run, facts, gpu, memo), _layers(run, facts, gpu, memo)
    microbatches, seconds = grid(layout, run.train).microbatches, one.seconds
    communication = dict.fromkeys(("tp", "cp", "ep", "etp"), (0.0, 0.0))
    for kind, n in one.busiest.layers.items():
        for dim, (size, waited) in communication.items():
            more = n * microbatches
            sent, time = layers[kind].sent.get(dim, 0) * more, layers[kind].waited.get(dim, 0) * more
            communication[dim] = (size + sent, waited + time)
    between, size = hop(run, facts, gpu)
    communication |= {"pp": (size * microbatches, between * microbatches), "dp": (one.sent, one.reduced)}
    flops: dict[str, float] = {}
    for held in holdings(run, facts, memo):
        for kind, n in [*held.layers.items(), ("loss", int(held.output))]:
            for part, count in layers[kind].flops.items():
                flops[part] = flops.get(part, 0.0) + count * n * microbatches * layout.world / layout.pp
    steps = schedule.last_step(run)
    hours = None if steps is None else seconds * steps / 3600
    sequences = run.train.global_batch * objectives.sequences(run.train)
    return Timing(
        flops=flops,
        communication={dim: pair for dim, pair in communication.items() if pair[0]},
        bubble=one.fill / (one.steady + one.fill),
        low=seconds * LOW,
        likely=seconds,
        high=seconds * HIGH,
        tokens_per_second=sequences * run.data.seq_length / seconds / layout.world,
        tflops=(sum(flops.values()) - flops["recompute"]) / seconds / layout.world / 1e12,
        hours=hours,
        cost=None if gpu.price is None or hours is None else gpu.price * layout.world * hours,
    )


def on_cpu(run: Run, facts: ModelFacts, gpu: Gpu) -> float:
    """Return the seconds of a step on this host's CPU: its FLOPs at a share of a matrix product's speed, measured here.

    All processes of the host share that speed.
    """
    flops = timing(run, facts, gpu).flops.values()
    return sum(flops) / cpu_flops() / OF_PRODUCT


def asking(run: Run, facts: ModelFacts, gpu: Gpu, rows: int) -> float:
    """Return the seconds of forward passes over this number of rows, at a legal layout.

    Not covered: the selection of the most likely tokens.
    """
    memo: dict[Any, Any] = {}
    layers, (between, _) = _layers(run, facts, gpu, memo), hop(run, facts, gpu)
    times = [
        sum(layers[kind].forward * n for kind, n in one.layers.items())
        + layers["loss"].forward * one.output
        + between / 2
        for one in holdings(run, facts, memo)
    ]
    batches = ceil(rows / (grid(run.layout, run.train).dp * run.train.micro_batch))
    return max(times) * batches + sum(times) - max(times)


def _layers(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> dict[str, Layer]:
    layout, train = run.layout, run.train
    cut = (layout.tp, layout.cp, layout.ep, layout.etp, layout.sp)
    key = ("layers", gpu.name, *cut, train.micro_batch, train.recompute, train.recompute_first, train.fp8)
    if key not in memo:
        memo[key] = {kind: layer(run, facts, gpu, kind) for kind in kinds(facts)}
        memo[key]["loss"] = _loss(run, facts, gpu)
    return memo[key]


def _ends(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> tuple[float, float]:
    """Return the additional seconds of the first and the last layer, if Bridge's FP8 recipe keeps them in bf16."""
    if run.train.fp8 != "current":
        return 0.0, 0.0
    plain = run.changed(train={"fp8": None})
    low, high = _layers(run, facts, gpu, memo), _layers(plain, facts, gpu, memo)
    first, last = (high[kind].seconds - low[kind].seconds for kind in (facts.kinds[0], facts.kinds[-1]))
    return first, last


def layer(run: Run, facts: ModelFacts, gpu: Gpu, kind: str) -> Layer:
    """Return the time of one layer and one microbatch."""
    products = work.products(run, facts, kind)
    moves = work.moved(run, facts, kind, products)
    costs = [(product, _product(run, facts, gpu, product), *rates.preparing(run, gpu, product)) for product in products]
    scores, attention = work.attention(run, facts, kind), rates.attention(run, facts, gpu, kind)
    moved, moved_back = rates.moving(run, gpu, moves)
    sent, waited = collectives(run, facts, gpu, kind, attention)
    host, talk = rates.starting(run, facts, gpu, kind), sum(waited.values())
    matrices = sum(seconds + before for _, seconds, before, _ in costs)
    experts = sum(seconds for product, seconds, *_ in costs if product.part == "experts")
    # nothing is queued after the host has waited for the count of tokens: experts start at the host's pace
    forward = max(matrices - experts + max(experts, host.experts) + attention + moved + talk, host.forward)
    back = sum(seconds * (2 if product.trained else 1) + before for product, seconds, _, before in costs)
    backward = max(back + rates.ATTENTION_BACKWARD * attention + moved_back + talk, host.backward)
    flops = {"scores": scores * (1 + rates.ATTENTION_BACKWARD)}
    for product in products:
        flops[product.part] = flops.get(product.part, 0) + product.flops * (3 if product.trained else 2)
    again, share = _again(run.train), recomputed(run, facts) if kind != "mtp" or not run.train.recompute_first else 0.0
    flops["recompute"] = sum(product.flops for product in products if product.part in again)
    flops["recompute"] += scores if "scores" in again else 0
    if run.train.recompute == "full":
        flops["recompute"] *= share
    # complete layers repeat their collectives; recomputed modules do not, except moe
    passes = 2 + (share if run.train.recompute == "full" else "moe" in run.train.recompute_modules)
    repeated = sum(seconds + before for product, seconds, before, _ in costs if product.part in again)
    repeated += rates.moving(run, gpu, [move for move in moves if move.name in again])[0]
    repeated += (attention if "scores" in again else 0) + (talk if passes == 3 else 0)
    return Layer(
        forward=forward,
        backward=backward,
        again=forward * share if run.train.recompute == "full" else repeated,
        flops=flops,
        sent={dim: count * passes for dim, count in sent.items()},
        waited={dim: seconds * passes for dim, seconds in waited.items()},
    )


# Work that recomputing a module repeats: parts of work.products, and kinds of work.moved.
AGAIN = {
    "core_attn": {"scores"},
    "layernorm": {"norm"},
    "moe_act": {"weighted activation"},
    "mla_up_proj": {"latent"},
    "mlp": {"mlp", "activation"},
    "moe": {"router", "experts", "shared experts", "permute", "weighted activation", "shared activation"},
    "shared_experts": {"shared experts", "shared activation"},
}
EVERY = {"attention", "latent", "adapters", "mtp", "scores"}.union(*AGAIN.values())


def recomputed(run: Run, facts: ModelFacts) -> float:
    """Return the share of the layers that are recomputed completely."""
    if run.train.recompute != "full" or run.train.recompute_first is None:
        return float(run.train.recompute == "full")
    return min(1.0, run.train.recompute_first * run.layout.pp * (run.layout.vpp or 1) / facts.layers)


def _again(train: Train) -> set[str]:
    if train.recompute == "full":
        return EVERY
    return set().union(*(AGAIN[module] for module in train.recompute_modules))


def _product(run: Run, facts: ModelFacts, gpu: Gpu, product: work.Product) -> float:
    return rates.product(run, gpu, product) * (uneven(run, facts) if product.part == "experts" else 1)


def _loss(run: Run, facts: ModelFacts, gpu: Gpu) -> Layer:
    products = work.output(run, facts)
    once = sum(rates.product(run, gpu, product) for product in products)
    passes = sum(rates.product(run, gpu, product) * (2 if product.trained else 1) for product in products)
    logits = sum(product.m * product.n for product in products)
    flops = sum(product.flops * (3 if product.trained else 2) for product in products)
    return Layer(once + logits * rates.LOSS / (gpu.hbm * rates.HBM), passes, 0.0, {"logits": flops}, {}, {})


def _reduction(run: Run, gpu: Gpu, held: list[Holding]) -> tuple[float, float, float]:
    """Return the costs of the reduction of gradients, once a step, on the slowest rank.

    They are the bytes that it sends to its copies, the seconds of that, and the seconds of the optimizer.
    """
    layout, cut = run.layout, grid(run.layout, run.train)
    gradient = 2 if run.optimizer.gradients == "bf16" else 4
    most = (0.0, 0.0, 0.0)
    for dense, expert in {holding.trained for holding in held}:
        sent = seconds = 0.0
        for count, group, stride in ((dense, cut.dp * layout.cp, layout.tp), (expert, cut.edp, layout.ep * layout.etp)):
            # gradients are scattered and weights gathered; without the distributed optimizer gradients are gathered
            size = count * (gradient + (byte(run.train) if run.optimizer.distributed else gradient))
            if group > 1:
                sent += size * (group - 1) / group
                seconds += gathered(gpu, size, group, stride) + LATENCY
        here, away = shares(run, cut, dense, expert)
        update = rates.updating(run.optimizer, gpu, here, away, dense + expert, cut.microbatches)
        most = max(most, (sent, seconds, update), key=lambda figures: figures[1] + figures[2])
    return most
