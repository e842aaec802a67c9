"""Numbers of parameters: of the whole model, and of the part that one rank of each pipeline stage holds.

    stages(run, facts)              a Stage for each pipeline rank, or for each of its virtual stages
    held(run, facts, stage)         parameters on one rank of the stage, by kind; the same on all its ranks
    trainable(run, facts, stage)    numbers of trained parameters: (dense, of experts)
    quantized(run, facts, stage)    parameters in matrices that train.fp8 multiplies in FP8 or model.base packs, and the
                                    number of these matrices; gate and up are two
    total(facts), active(facts)     parameters of the released checkpoint, and those that one token passes through
    parts(facts, kind)              parameters of one complete layer, dense or moe
    linears(facts, kind, of)        its matrices of some kinds of weights; by default all except those of experts

The counts are exact for Megatron-Bridge 0.6 and megatron-core 0.19; trainer/rehearse.py compares them. The layout must
be legal (conf/rules/layout.py). Every rank of tp holds norms, routers and MLA's down projections completely. It holds
rank * (in + out) / tp of Bridge's adapters and of experts' adapters. Of a lean adapter it holds a part of the matrix on
the side that the layer cuts, and the other matrix completely: rank * (in + out / tp) after a norm. Multi-token-
prediction layers are on the last stage, which then has a copy of the embedding.

Not covered: expert biases of routers, which are buffers in Megatron; total() counts them, as the released files do.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from conf import families
from conf.families.parts.tensors import Tensor
from conf.model_facts import ModelFacts
from conf.rules import packed_base
from conf.rules.model import ROW_PARALLEL, WHOLE, shares
from conf.schema.run import Run
from conf.schema.sections import Adapter

MLPS = ("mlp", "shared_experts")  # kinds that are cut over tp
# An mtp layer has the kinds of an ordinary layer; "mtp" counts its additional parameters.
KINDS = ("embedding", "output", "attention", *MLPS, "router", "experts", "norms", "mtp", "per_layer")
ADAPTERS = ("adapters_dense", "adapters_experts")


@dataclass(frozen=True)
class Stage:
    rank: int  # of the pipeline
    layers: tuple[str, ...]  # dense, moe or mtp, in order
    embedding: bool  # whether it holds an embedding: the first stage, and a last stage with MTP layers
    output: bool  # computes the logits
    virtual: int = 0  # number of the virtual stage on its rank
    first: int = field(default=0, compare=False)  # its first layer; stages with the same content are equal


@dataclass(frozen=True)
class Linear:
    """A layer's matrix with its uncut input and output sizes."""

    name: str  # Megatron's, as in adapter.targets
    into: int
    out: int
    cut: str = "column"  # column, row, or whole on every rank of tp
    bias: bool = False


def stages(run: Run, facts: ModelFacts) -> list[Stage]:
    """Stages by rank, then by virtual stage.

    With 4 layers on 2 ranks and vpp 2, the first rank has layers 0 and 2, the other 1 and 3.
    """
    layout, vpp = run.layout, run.layout.vpp or 1
    counts = shares(layout, facts.layers)
    assert counts, f"illegal layout: {layout} of {facts.layers} layers"
    mtp = facts.mtp_layers if run.model.mtp else 0
    found, layer = [], 0
    for virtual in range(vpp):
        for rank in range(layout.pp):
            count = counts[rank] // vpp
            last = (rank, virtual) == (layout.pp - 1, vpp - 1)
            kinds = facts.kinds[layer : layer + count] + (("mtp",) * mtp if last else ())
            found.append(Stage(rank, kinds, rank == virtual == 0 or (last and mtp > 0), last, virtual, layer))
            layer += count
    return sorted(found, key=lambda stage: (stage.rank, stage.virtual))


def held(run: Run, facts: ModelFacts, stage: Stage) -> dict[str, int]:
    tp, norm = run.layout.tp, facts.hidden * (2 if facts.layernorm else 1)
    found: Counter[str] = Counter(dict.fromkeys((*KINDS, *ADAPTERS), 0))
    vocabulary = facts.padded_vocab(tp) // tp * facts.hidden
    if stage.embedding:
        found["embedding"] += vocabulary + facts.positions * facts.hidden
        width = facts.layers * facts.per_layer
        found["embedding"] += facts.padded_vocab(tp) // tp * width
        found["per_layer"] += width * facts.hidden + facts.per_layer
    if stage.output:
        first = stage.rank == stage.virtual == 0
        found["output"] += 0 if facts.tied and first else vocabulary
        found["norms"] += norm
    for kind, count in Counter(stage.layers).items():
        for key, size in _layer(run, facts, kind).items():
            found[key] += size * count
    return dict(found)


def trainable(run: Run, facts: ModelFacts, stage: Stage) -> tuple[int, int]:
    found = held(run, facts, stage)
    if run.adapter.kind != "none":
        return found["adapters_dense"], found["adapters_experts"]
    frozen = found["router"] if run.moe.freeze_router else 0
    return sum(found.values()) - found["experts"] - frozen, found["experts"]


def quantized(run: Run, facts: ModelFacts, stage: Stage) -> tuple[int, int]:
    """Return the parameters in matrices with fewer bits, without biases, and the number of these matrices."""
    layers = list(stage.layers)
    if run.train.fp8 == "current":  # Bridge's recipe leaves the model's first and last layer in bf16
        ordinary = [kind for kind in layers if kind != "mtp"]
        first, last = stage.rank == stage.virtual == 0, stage.output
        layers = ordinary[first : len(ordinary) - last] + [kind for kind in layers if kind == "mtp"]
    numbers = matrices = 0
    for kind, count in Counter(layers).items():
        for ranks, each, linear in _low(run, facts, kind):
            numbers += count * each * _size(replace(linear, bias=False), ranks)
            matrices += count * each * (2 if facts.gated and linear.name == "linear_fc1" else 1)
    return numbers, matrices


def total(facts: ModelFacts) -> int:
    """Return the parameters of the released checkpoint, whose MTP layers repeat the embedding and the output layer."""
    return _whole(facts, facts.experts) + facts.mtp_layers * _sum(families.layer(facts, "mtp"), facts.experts)


def active(facts: ModelFacts) -> int:
    """Return the number of parameters that one token passes through.

    Multi-token prediction does not count, as only training uses it. The whole embedding counts, as is usual.
    """
    return _whole(facts, facts.top_k)


def _whole(facts: ModelFacts, experts: int) -> int:
    first, last = families.named(facts.architecture).ends(facts)
    layers = Counter(facts.kinds).items()
    return _sum((*first, *last), 0) + sum(_sum(families.layer(facts, kind), experts) * n for kind, n in layers)


def _sum(tensors: Iterable[Tensor], experts: int) -> int:
    """Return the parameters in these tensors, with this number of experts."""
    return sum(tensor.size // tensor.experts * experts if tensor.experts else tensor.size for tensor in tensors)


def parts(facts: ModelFacts, kind: str) -> dict[str, int]:
    """Return the parameters of one complete layer by KINDS, with all its experts."""
    return _weights(facts, kind, 1) | {"experts": _sum(families.layer(facts, kind, "experts"), facts.experts)}


@lru_cache
def linears(facts: ModelFacts, kind: str, of: tuple[str, ...] = ("attention", *MLPS)) -> list[Linear]:
    """Return the matrices of one layer of these kinds of weights. The default: without routed experts and MTP."""
    return [linear for each in of for linear in _linears(facts, kind, each) if linear.into]


def _layer(run: Run, facts: ModelFacts, kind: str) -> Counter[str]:
    """Return the parameters of one layer on one rank, with its adapters."""
    layout, found = run.layout, Counter(_weights(facts, kind, run.layout.tp))
    experts = _linears(facts, kind, "experts")
    local = facts.experts // layout.ep if experts else 0
    found["experts"] = local * sum(_size(linear, layout.etp) for linear in experts)
    if facts.kv_rank and not facts.q_rank:
        found["norms"] += facts.hidden  # core has a second norm before linear_q_proj, which no release has
    if run.adapter.kind == "none":
        return found
    lean = run.adapter.kind == "lora" and run.adapter.lean
    found["adapters_dense"] = sum(_adapter(run.adapter, linear, layout.tp, lean) for linear in linears(facts, kind))
    # without grouped products each expert is a separate module with its own adapter
    each = local if run.adapter.experts == "each" or not run.moe.grouped_gemm else min(local, 1)
    found["adapters_experts"] = each * sum(_adapter(run.adapter, linear, layout.etp) for linear in experts)
    return found


@lru_cache
def _weights(facts: ModelFacts, kind: str, tp: int) -> dict[str, int]:
    """Return the parameters of one layer on a rank of tp, without its routed experts."""
    found = {}
    for of in ("attention", "norms", "router", "mtp", "per_layer", *MLPS):
        whole = sum(tensor.size for tensor in families.layer(facts, kind, of) if not tensor.part)
        found[of] = whole + sum(_size(linear, tp) for linear in _linears(facts, kind, of))
    return found


def _low(run: Run, facts: ModelFacts, kind: str) -> Iterator[tuple[int, int, Linear]]:
    """Yield the matrices of a layer with fewer bits: the ranks that share each, its count on a rank, and the matrix."""
    low, layout = packed_base.parts(run) if packed_base.format_of(run) else packed_base.PARTS, run.layout
    kinds = [*(["attention"] if "attention" in low else []), *((*MLPS, "mtp") if "dense" in low else [])]
    for linear in linears(facts, kind, tuple(kinds)):
        yield layout.tp, 1, linear
    for linear in _linears(facts, kind, "experts") if "experts" in low else ():
        yield layout.etp, facts.experts // layout.ep, linear


@lru_cache
def _linears(facts: ModelFacts, kind: str, of: str) -> list[Linear]:
    """Return Megatron's layers of one kind of tensors. Each consists of one or more released matrices and their biases.

    Sinks are a bias without a matrix.
    """
    found: dict[str, Linear] = {}
    for tensor in families.layer(facts, kind, of):
        if not tensor.part:
            continue
        cut = "row" if tensor.part in ROW_PARALLEL else "whole" if tensor.part in WHOLE else "column"
        linear = found.get(tensor.part, Linear(tensor.part, 0, 0, cut))
        if tensor.matrix:
            out, into = tensor.matrix
            found[tensor.part] = replace(linear, into=into, out=linear.out + out)
        else:
            out = linear.out if linear.into else prod(tensor.shape[tensor.stacked :])
            found[tensor.part] = replace(linear, out=out, bias=True)
    return list(found.values())


def _size(linear: Linear, tp: int = 1) -> int:
    matrix = linear.into * linear.out // (1 if linear.cut == "whole" else tp)
    bias = linear.out // (tp if linear.cut == "column" else 1) if linear.bias else 0
    return matrix + bias


def _adapter(adapter: Adapter, linear: Linear, tp: int, lean: bool = False) -> int:
    if linear.name not in adapter.names:
        return 0
    inner, outer = (1 if lean and linear.cut != cut else tp for cut in ("row", "column"))
    size = adapter.rank * linear.into // inner + adapter.rank * linear.out // outer
    # DoRA has one magnitude for each row of the weight that a rank holds
    rows = linear.out // tp if linear.cut == "column" else linear.out
    return size + (rows if adapter.kind == "dora" else 0)
