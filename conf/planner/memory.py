"""Memory of training on the fullest GPU of each pipeline stage.

    memory(run, facts, gpu)    a StageMemory per pipeline rank
    asking(run, facts, gpu)    the same for a reference model, which only scores rows

The figures follow Megatron's allocations. conf/planner/states.py has the memory of parameters and their states,
conf/planner/activations.py the memory of activations. A rank needs most memory in the backward pass of a layer, at the
loss, in the step of the optimizer or while weights are loaded.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from conf.model_facts import ModelFacts
from conf.planner import activations, parameters, states
from conf.planner.hardware import GIB, Gpu
from conf.planner.parameters import Stage
from conf.planner.states import byte, state_bytes
from conf.rules import chunked_loss, packed_base
from conf.rules.layout import grid
from conf.schema.run import Layout, Run

# Memory that torch does not see, measured on an H200 (benchmarks/gpu/calibrate.py): CUDA's context with the code of
# cuBLAS, Transformer Engine and attention, and the buffers of an NCCL communicator of one rank and of several ranks.
CONTEXT, NCCL_ALONE, NCCL_GROUP = int(0.74e9), int(0.45e9), int(0.51e9)
# Megatron uses these groups even if they have one rank: the world, tp, the ranks that share a model, dp with and
# without cp, and edp. In addition to torch's memory, an H200 had 3.4 to 3.9 GB in use in steps on one and two GPUs, and
# an H100 3.0 on one and 4.0 to 4.2 on two in dp, tp, cp or pp.
ALWAYS = 6
# More groups with experts over several ranks: NCCL's log names three communicators, and one also has channels for each
# pair of ranks. Two H100 had 5.9 GB in use in addition to torch's at ep2, and 6.4 with MTP or tp2, with any model.
OF_EXPERTS = 4
PROCESS = int(0.8 * GIB)  # resident libraries of a rank on a CPU: 0.97 GB were measured with a tiny model
WORKSPACE = int(0.2 * GIB)  # cuBLAS and Transformer Engine: 32 MiB per stream, and as much per grouped product
SHARED_BUFFERS = 16  # of a layer's input each, of tensor-parallel ranks with train.overlap_tp: 2.7 GB for GPT2-large
# Share of temporary memory that the caching allocator holds but cannot use; weights and states lie in few blocks.
# Routing gives every microbatch other sizes; expandable segments, which trainer/startup/device.py sets, halved the
# share. Without routing and with frozen weights, sizes repeat: 0.2 to 4 % were held on H100s.
FRAGMENTS, EVEN = 0.08, 0.03
HOPPER = 9.0  # compute capability with which torch has a product of all experts, for weights and for adapters
DRY = 0.02  # share of a GPU's memory: with less free memory the allocator empties its cache again and again


Costs = dict[str, tuple[int, dict[str, int]]]  # by kind of layer: bytes that it keeps, and bytes that it works with


@dataclass(frozen=True)
class StageMemory:
    """Bytes on the fullest rank of a pipeline stage, at its fullest moment."""

    rank: int  # of the pipeline
    weights: int
    gradients: int
    optimizer: int
    adapters: int  # the adapters' weights
    copies: int  # copies of weights in FP8
    activations: int  # kept from forward to backward, of all microbatches in flight
    logits: int  # at the loss; 0 if a layer's backward pass takes more
    dispatch: int  # tokens on their way to experts and back
    working: int  # recomputed activations and gradients of one layer
    buffers: int  # of NCCL and cuBLAS
    context: int
    margin: int
    capacity: int  # of the GPU

    @property
    def items(self) -> dict[str, int]:
        return {key: value for key, value in vars(self).items() if key not in ("rank", "capacity")}

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def allocated(self) -> int:
        """Bytes that torch.cuda.max_memory_allocated() shows."""
        return self.total - self.context - self.buffers - self.margin

    @property
    def over(self) -> int:
        """Bytes that are missing; a negative number is room."""
        return self.total - int(self.capacity * (1 - DRY))


@dataclass(frozen=True)
class Holding:
    """Layers and parameters that a pipeline rank holds at all times. Parameters are counted on one GPU."""

    rank: int
    layers: dict[str, int]  # number of layers by kind
    output: bool
    parameters: int  # without adapters
    adapters: int
    trained: tuple[int, int]  # dense, of experts
    quantized: int  # parameters that are multiplied in FP8 if train.fp8 is set
    matrices: int  # matrices of these parameters


def memory(run: Run, facts: ModelFacts, gpu: Gpu) -> list[StageMemory]:
    """Return the memory of each pipeline stage of a legal layout."""
    costs = _costs(run, facts, {})
    return [_rank(run, facts, gpu, holding, costs) for holding in holdings(run, facts, {})]


def asking(run: Run, facts: ModelFacts, gpu: Gpu) -> list[StageMemory]:
    """Return the memory of each pipeline stage while a reference model scores rows, in forward passes only."""
    bare = run.changed(train={"recompute": "none"})
    cut, found, kinds = grid(run.layout, run.train), [], activations.kinds(facts)
    # a forward pass makes as much as the gradients of a backward pass take
    works = {kind: {"logits": 0, **activations.working(bare, facts, kind, 0)} for kind in kinds}
    for holding in holdings(run, facts, {}):
        moments = [works[kind] for kind in holding.layers]
        if holding.output:
            moments.append(activations.at_loss(run, facts))
        loading = states.passing(run, cut, 0, 0, holding.quantized)
        moments.append({"logits": 0, "dispatch": 0, "working": loading})
        peak, kept = max(moments, key=lambda moment: sum(moment.values())), holding.output * activations.outputs(run)
        margin = int((kept + sum(peak.values())) * _fragments(run, facts))
        found.append(_stage(run, facts, gpu, holding, activations=kept, margin=margin, **peak))
    return found


def fullest(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> StageMemory:
    """Return the pipeline stage that takes the most memory.

    Of ranks that hold the same, only the first is computed, as it has most microbatches in flight. `memo` keeps values
    that other layouts of this run share.
    """
    costs = _costs(run, facts, memo)
    first: dict[Any, Holding] = {}
    for holding in holdings(run, facts, memo):
        kind = (holding.parameters, holding.trained, holding.quantized, holding.output, *holding.layers.items())
        first.setdefault(kind, holding)
    found = [_rank(run, facts, gpu, holding, costs) for holding in first.values()]
    return max(found, key=lambda stage: stage.total)


def lasting(run: Run, facts: ModelFacts, gpu: Gpu, memo: dict[Any, Any]) -> int:
    """Return the bytes of weights, gradients and optimizer on the fullest rank, which it holds at all times."""
    cut = grid(run.layout, run.train)
    return max(
        sum(states.weights(run, gpu, holding.parameters, holding.quantized, holding.matrices))
        + holding.adapters * byte(run.train)
        + sum(state_bytes(run, cut, *holding.trained))
        for holding in holdings(run, facts, memo)
    )


def holdings(run: Run, facts: ModelFacts, memo: dict[Any, Any]) -> list[Holding]:
    layout = run.layout
    cut = (layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, layout.first_stage_layers, layout.last_stage_layers)
    key = ("holdings", *cut)
    if key not in memo:
        ranks: dict[int, list[Stage]] = {}
        for stage in parameters.stages(run, facts):
            ranks.setdefault(stage.rank, []).append(stage)
        alike: dict[Any, Holding] = {}  # stages in the middle of a pipeline hold the same
        memo[key] = []
        for rank, mine in sorted(ranks.items()):
            kind = tuple((stage.layers, stage.embedding, stage.output) for stage in mine)
            if kind not in alike:
                alike[kind] = _holding(run, facts, rank, mine)
            memo[key].append(replace(alike[kind], rank=rank))
    return memo[key]


def _holding(run: Run, facts: ModelFacts, rank: int, stages: list[Stage]) -> Holding:
    layers: Counter[str] = Counter()
    counts = [0, 0, 0, 0, 0, 0]
    for stage in stages:
        layers.update(stage.layers)
        held, trained = parameters.held(run, facts, stage), parameters.trainable(run, facts, stage)
        adapters = sum(count for key, count in held.items() if key.startswith("adapters"))
        more = (sum(held.values()) - adapters, adapters, *trained, *parameters.quantized(run, facts, stage))
        counts = [one + other for one, other in zip(counts, more, strict=True)]
    output, (base, adapters, dense, expert, *low) = any(stage.output for stage in stages), counts
    return Holding(rank, layers, output, base, adapters, (dense, expert), *low)


def _costs(run: Run, facts: ModelFacts, memo: dict[Any, Any]) -> Costs:
    """Return the bytes that each kind of layer keeps, and those that it works with. The loss works with the logits."""
    layout, train = run.layout, run.train
    cut = (layout.tp, layout.cp, layout.ep, layout.etp, layout.sp, train.micro_batch, train.cuda_graphs)
    key, of_parts = ("costs", *cut, train.recompute), ("parts", *cut, train.recompute_modules)
    if of_parts not in memo:
        memo[of_parts] = {kind: sum(activations.parts(run, facts, kind).values()) for kind in activations.kinds(facts)}
    if key not in memo:
        memo[key] = {"loss": (0, activations.at_loss(run, facts))}
        for kind, size in memo[of_parts].items():
            kept, works = activations.kept(run, facts, kind, size), activations.working(run, facts, kind, size)
            memo[key] |= {kind: (kept, works), f"whole {kind}": (activations.held(facts, size), {})}
    return memo[key]


def in_flight(layout: Layout, microbatches: int, rank: int) -> float:
    """Return the number of microbatches whose activations a pipeline rank keeps at once, in units of all its layers."""
    if layout.vpp is None:
        return min(microbatches, layout.pp - rank)
    # warm-up of core's interleaved schedule in chunks, and the chunk that runs
    chunks = (layout.pp - rank - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return min(chunks, microbatches * layout.vpp) / layout.vpp


def _rank(run: Run, facts: ModelFacts, gpu: Gpu, holding: Holding, costs: Costs) -> StageMemory:
    cut = grid(run.layout, run.train)
    gradients, optimizer = state_bytes(run, cut, *holding.trained)
    blocks = dict(holding.layers)
    if run.train.recompute == "full" and run.train.recompute_first is not None:
        blocks = _first_blocks(holding.layers, run.train.recompute_first * (run.layout.vpp or 1))
    elif run.train.recompute == "full":  # blocks keep their input; each MTP layer is recomputed separately
        blocks = {kind: n if kind == "mtp" else ceil(n / run.train.recompute_layers) for kind, n in blocks.items()}
    flying = in_flight(run.layout, cut.microbatches, holding.rank)
    kept = int(sum(costs[kind][0] * n for kind, n in blocks.items()) * flying)
    # Other memory in use at the peak: in the backward pass of a layer, or at the loss.
    empty = _empty_gradients(run, facts, holding) if gpu.cuda else 0
    gradient = empty or _largest_gradient(run, facts, holding)
    works = [costs[kind][1] for kind in holding.layers]
    moments = [{"logits": 0, **one, "working": one["working"] + gradient} for one in works]
    if holding.output:  # also the gradient of the output layer's weight
        output = _trained_bytes(run, _output_weights(run, facts)) + empty
        loss = costs["loss"][1]
        moments += [{**loss, "working": loss["working"] + output}]
    # Blocks of chunks of logits, which layers of one size do not fill: Llama-3.1-8B had 2 GB of them on an H200.
    chunked = holding.output and chunked_loss.is_chunked(run) and not facts.experts
    loss_blocks = costs["loss"][1]["logits"] // 2 if chunked else 0
    for moment in moments:
        moment["margin"] = int((kept + sum(moment.values())) * _fragments(run, facts))
        moment["margin"] += _too_small(run, facts, gpu, holding, works) if moment["logits"] else loss_blocks
    passing = states.passing(run, cut, *holding.trained, holding.quantized)
    moments += [{"logits": 0, "dispatch": 0, "working": passing - kept, "margin": int(passing * EVEN)}]
    for moment in moments if not gpu.cuda else []:  # copies of the rank's part of a checkpoint are in the same memory
        moment["working"] += states.saving(run, cut, *holding.trained)
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return _stage(run, facts, gpu, holding, gradients=gradients, optimizer=optimizer, activations=kept, **peak)


def _fragments(run: Run, facts: ModelFacts) -> float:
    return FRAGMENTS if facts.experts or run.adapter.kind == "none" else EVEN


def _stage(
    run: Run, facts: ModelFacts, gpu: Gpu, holding: Holding, gradients: int = 0, optimizer: int = 0, **moment: int
) -> StageMemory:
    """Return the memory at this moment, with the memory that is in use at all times."""
    weights, copies = states.weights(run, gpu, holding.parameters, holding.quantized, holding.matrices)
    input_bytes = int(activations.tokens(run, facts).whole) * facts.hidden * byte(run.train)
    shared = SHARED_BUFFERS * input_bytes if run.train.overlap_tp else 0
    groups = _groups(run, facts) * (NCCL_GROUP if run.world > 1 else NCCL_ALONE)
    return StageMemory(
        rank=holding.rank,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        adapters=holding.adapters * byte(run.train),
        copies=copies,
        buffers=WORKSPACE + groups + shared if gpu.cuda else 0,
        context=CONTEXT if gpu.cuda else PROCESS,
        capacity=gpu.memory,
        **moment,
    )


def _first_blocks(layers: dict[str, int], first: int) -> dict[str, int]:
    """Return the numbers of layers that keep their input, by kind, and of layers that keep everything ("whole moe").

    Dense layers come first. Multi-token-prediction layers are not recomputed.
    """
    blocks: dict[str, int] = {}
    for kind in sorted(layers):
        again = 0 if kind == "mtp" else min(layers[kind], first)
        first -= again
        blocks |= {kind: again, f"whole {kind}": layers[kind] - again}
    return blocks


def _output_weights(run: Run, facts: ModelFacts) -> int:
    return facts.padded_vocab(run.layout.tp) // run.layout.tp * facts.hidden


def _too_small(run: Run, facts: ModelFacts, gpu: Gpu, holding: Holding, works: list[dict[str, int]]) -> int:
    """Return the bytes that are free at the loss, but in blocks that are too small for the logits.

    These blocks held tokens that were sent to experts, and one layer's frozen experts, a block for each matrix
    (trainer/megatron/frozen_experts.py). If layers keep more than their input, it fills these blocks.
    """
    if not facts.experts or run.train.recompute != "full" or run.train.recompute_first is not None:
        return 0
    sent = max(work["dispatch"] for work in works)
    packed = packed_base.format_of(run) and "experts" in packed_base.parts(run)
    if packed or not is_one_product(run, gpu) or not any(map(facts.routed, holding.layers)):
        return sent
    matrix = facts.experts // run.layout.ep * facts.expert_hidden * facts.expert_ffn // run.layout.etp * byte(run.train)
    gate = 2 if facts.gated else 1
    each = activations.tokens(run, facts).whole * _output_weights(run, facts) // facts.hidden * byte(run.train)
    return sent + matrix * gate + matrix - (each if each <= matrix * gate else 0)


def is_one_product(run: Run, gpu: Gpu) -> bool:
    """Whether a layer's frozen experts are one product, whatever their number (trainer/megatron/frozen_experts.py)."""
    train, adapter = run.train, run.adapter
    lean = adapter.kind != "none" and adapter.lean and run.moe.grouped_gemm
    return lean and gpu.capability == HOPPER and train.precision == "bf16" and not train.fp8


def _empty_gradients(run: Run, facts: ModelFacts, holding: Holding) -> int:
    """Return the bytes of empty gradients. Transformer Engine keeps one for each size of weight.

    If every weight is trained, products add their gradient to the fp32 sum (gradient_accumulation_fusion), and autograd
    gets an empty gradient (get_dummy_wgrad). The gradients of adapters are small.
    """
    if run.adapter.kind != "none":
        return 0
    layout, gate = run.layout, 2 if facts.gated else 1
    sizes = {_output_weights(run, facts)} if holding.output else set()
    for kind in holding.layers:
        for linear in parameters.linears(facts, facts.base(kind)):
            sizes.add(linear.into * linear.out // (1 if linear.cut == "whole" else layout.tp))
        if facts.routed(kind):
            matrix = facts.expert_hidden * facts.expert_ffn // layout.etp
            sizes |= {matrix, matrix * gate}
    return sum(sizes) * byte(run.train)


def _largest_gradient(run: Run, facts: ModelFacts, holding: Holding) -> int:
    """Return the bytes of the largest weight gradient outside the fp32 sum, or of the largest unpacked weight.

    Fusing the gradient with the sum would require APEX, which is not installed.
    """
    layout, gate = run.layout, 2 if facts.gated else 1
    sizes = [facts.hidden * facts.ffn * gate // layout.tp]
    packed = packed_base.format_of(run) is not None
    routed = any(map(facts.routed, holding.layers))
    if routed and (not packed or "experts" in packed_base.parts(run)):
        # one product computes the gradients of all experts of a rank
        sizes.append(facts.experts // layout.ep * facts.expert_hidden * facts.expert_ffn * gate // layout.etp)
    if packed:
        return max(sizes) * byte(run.train)
    return _trained_bytes(run, max(sizes))


def _trained_bytes(run: Run, weights: int) -> int:
    return weights * byte(run.train) if run.adapter.kind == "none" else 0


def _groups(run: Run, facts: ModelFacts) -> int:
    """Return the number of communicators that a rank opens."""
    layout = run.layout
    groups = ALWAYS + sum(degree > 1 for degree in (layout.cp, layout.pp, layout.etp))
    groups += OF_EXPERTS + (layout.tp > 1) if layout.ep > 1 else 0
    return groups + (facts.mtp_layers > 0 and run.model.mtp)
