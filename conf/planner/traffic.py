"""Traffic of a layer to other GPUs, and the time that GPUs wait for it.

    collectives(run, facts, gpu, kind, attention)    bytes and seconds of one layer and one pass, by dimension
    hop(run, facts, gpu)                             seconds and bytes of one microbatch between stages
    gathered(gpu, size, ranks, stride)               seconds of one collective

The place of a group of ranks follows from core's order of ranks, tp-cp-ep-dp-pp with tp innermost. If the ranks of a
group are `stride` apart, domain / stride of them share one NVLink; the other traffic uses the network.
"""

from math import ceil

from conf.model_facts import ModelFacts
from conf.planner import work
from conf.planner.activations import tokens
from conf.planner.hardware import ALL_TO_ALL, LINK, NETWORK, Gpu
from conf.schema.run import Run

LATENCY = 20e-6  # seconds per step of a collective, for NCCL's kernel and its peer; 0.24 ms for 67 MB over 4 H200
OVERLAPPED = 0.5  # share of tp's time that train.overlap_tp does not hide: 35 of about 73 ms for GPT2-large on two H200
MESSAGE = 3e-6  # seconds per peer of an all-to-all outside the host, for a send and a receive without their bytes


def collectives(
    run: Run, facts: ModelFacts, gpu: Gpu, kind: str, attention: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a rank sends in one pass of a layer, and the seconds that it waits for them."""
    layout, sent, waited = run.layout, {}, {}
    strides = {"tp": 1, "etp": 1, "cp": layout.tp, "ep": layout.etp}
    for dim, size in work.exchanged(run, facts, kind).items():
        ranks = getattr(layout, dim)
        if ranks == 1 or not size:
            continue
        if dim == "ep":
            seconds, sent[dim] = _all_to_all(gpu, size, ranks, strides[dim]), size * (ranks - 1) / ranks
            waited[dim] = seconds * uneven(run, facts) + 2 * LATENCY
        elif dim == "cp":
            sent[dim] = size
            inside = strides[dim] * ranks <= gpu.joined
            ring = size / (gpu.link * LINK if inside else gpu.network * NETWORK)
            waited[dim] = max(0.0, ring - attention) + LATENCY * (ranks - 1)
        else:
            sent[dim] = size * (ranks - 1) / ranks
            waited[dim] = gathered(gpu, size, ranks, strides[dim]) + 4 * LATENCY * (ranks - 1)
            waited[dim] *= OVERLAPPED if dim == "tp" and run.train.overlap_tp else 1
    return sent, waited


def uneven(run: Run, facts: ModelFacts) -> float:
    t = tokens(run, facts)
    return t.busiest / t.routed if t.routed else 1.0


def gathered(gpu: Gpu, size: float, ranks: int, stride: int) -> float:
    """Return the seconds to gather `size` bytes, or to reduce and scatter them, in rings over all links at once."""
    here = max(1, min(ranks, gpu.joined // stride))
    away = ceil(ranks / here)
    inside = size * (ranks - 1) / ranks / (gpu.link * LINK) if here > 1 else 0.0
    return max(inside, size * (away - 1) / away / (here * gpu.network * NETWORK))


def _all_to_all(gpu: Gpu, size: float, ranks: int, stride: int) -> float:
    here = max(1, min(ranks, gpu.joined // stride))
    inside = size * (here - 1) / ranks / (gpu.link * ALL_TO_ALL)
    return max(inside, size * (ranks - here) / ranks / (gpu.network * ALL_TO_ALL)) + (ranks - here) * MESSAGE


def hop(run: Run, facts: ModelFacts, gpu: Gpu) -> tuple[float, float]:
    """Return the seconds and bytes of a microbatch between stages, forward and back, over all virtual stages."""
    layout = run.layout
    if layout.pp == 1:
        return 0.0, 0.0
    t = tokens(run, facts)
    size = t.local * facts.hidden * t.byte
    rate = gpu.link * LINK if layout.world <= gpu.joined else gpu.network * NETWORK
    return 2 * (layout.vpp or 1) * (size / rate + LATENCY), 2.0 * (layout.vpp or 1) * size
