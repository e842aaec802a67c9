"""Numbers of parameters: of the whole model, and of the part that one rank of each pipeline stage holds.

    stages(run, facts)              what lies where: a Stage per pipeline rank, or per virtual stage of one
    held(run, facts, stage)         parameters on one rank of it, by kind; all ranks of a stage hold as many
    trainable(run, facts, stage)    how many of them are trained: (dense, of experts)
    quantized(run, facts, stage)    how many lie in matrices that train.fp8 multiplies in FP8
    matrices(run, facts, stage)     how many such matrices there are; gate and up are two
    total(facts), active(facts)     of the released checkpoint; of what one token passes through
    parts(facts, kind)              of one whole layer, dense or moe; linears(facts, kind) has its matrices but experts'

As Megatron-Bridge 0.6 and megatron-core 0.19 build them, to the parameter; trainer/rehearse.py compares. The layout is
taken to be legal (conf/rules/layout.py). Every rank of tp holds whole norms, routers and MLA's down projections. Of
Bridge's adapters and of experts' it holds rank * (in + out) / tp; of a lean one a part of the matrix on the side where
the layer is cut, and the other whole: rank * (in + out / tp) behind a norm. Layers of multi-token prediction lie on the
last stage, which then has an embedding of its own.

Not covered: routers' expert biases, which are buffers in Megatron; total() counts them, as the released files do.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from conf.model_facts import ModelFacts
from conf.rules import packed_base
from conf.rules.layout import shares
from conf.schema.run import Run
from conf.schema.sections import Adapter

KINDS = (
    "embedding",
    "output",
    "attention",
    "mlp",
    "router",
    "experts",
    "shared_experts",
    "norms",
    "mtp",  # what such a layer has besides an ordinary one, which counts with its kinds
    "adapters_dense",
    "adapters_experts",
)


@dataclass(frozen=True)
class Stage:
    rank: int  # of the pipeline
    layers: tuple[str, ...]  # dense, moe or mtp, in order
    embedding: bool  # holds one: the first stage, and the last if it has MTP layers
    output: bool  # computes the logits
    virtual: int = 0  # which of the rank's stages


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

    With vpp 2, of 4 layers on 2 ranks the first has 0 and 2, the other 1 and 3.
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
            layer += count
            found.append(Stage(rank, kinds, rank == virtual == 0 or (last and mtp > 0), last, virtual))
    return sorted(found, key=lambda stage: (stage.rank, stage.virtual))


def held(run: Run, facts: ModelFacts, stage: Stage) -> dict[str, int]:
    tp, norm = run.layout.tp, facts.hidden * (2 if facts.layernorm else 1)
    found: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    vocabulary = facts.padded_vocab(tp) // tp * facts.hidden
    if stage.embedding:
        found["embedding"] += vocabulary + facts.positions * facts.hidden
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


def quantized(run: Run, facts: ModelFacts, stage: Stage) -> int:
    layers = list(stage.layers)
    if run.train.fp8 == "current":  # Bridge's recipe leaves the model's first and last layer in bf16
        ordinary = [kind for kind in layers if kind != "mtp"]
        first, last = stage.rank == stage.virtual == 0, stage.output
        layers = ordinary[first : len(ordinary) - last] + [kind for kind in layers if kind == "mtp"]
    return sum(_matrices(run, facts, kind) * count for kind, count in Counter(layers).items())


def matrices(run: Run, facts: ModelFacts, stage: Stage) -> int:
    found = 0
    for kind, count in Counter(stage.layers).items():
        found += count * sum(each * _apart(some, facts) for _, each, some in _low(run, facts, kind))
        found += count * (kind == "mtp" and "dense" in _parts(run))
    return found


def total(facts: ModelFacts) -> int:
    """Parameters of the released checkpoint, whose MTP layers repeat the embedding and the output layer."""
    return _whole(facts, facts.experts) + facts.mtp_layers * (
        _layer_size(facts, facts.kinds[-1], facts.experts) + _mtp(facts, 1) + 2 * facts.vocab * facts.hidden
    )


def active(facts: ModelFacts) -> int:
    """Parameters that one token passes through.

    Multi-token prediction is left out, as only training uses it. The embedding counts whole, as is usual.
    """
    return _whole(facts, facts.top_k)


def _whole(facts: ModelFacts, experts: int) -> int:
    ends = (facts.vocab * (1 if facts.tied else 2) + facts.positions) * facts.hidden
    ends += facts.hidden * (2 if facts.layernorm else 1)
    return ends + sum(_layer_size(facts, kind, experts) * n for kind, n in Counter(facts.kinds).items())


def parts(facts: ModelFacts, kind: str, experts: int | None = None) -> dict[str, int]:
    """Parameters of one whole layer by KINDS, with all of its experts or so many."""
    count = 0 if kind != "moe" else facts.experts if experts is None else experts
    return _weights(facts, kind, 1, 1) | {"experts": sum(map(_size, _expert(facts))) * count}


def linears(facts: ModelFacts, kind: str) -> list[Linear]:
    """Matrices of one layer, but for the router and the routed experts."""
    return _attention(facts) + _mlp(facts.ffn if kind == "dense" else facts.shared_ffn, facts)


def _layer_size(facts: ModelFacts, kind: str, experts: int) -> int:
    found = parts(facts, kind, experts)
    return sum(found.values()) + (facts.experts if kind == "moe" and facts.expert_bias else 0)


def _layer(run: Run, facts: ModelFacts, kind: str) -> Counter[str]:
    """Parameters of one layer on one rank, with its adapters."""
    layout, base = run.layout, facts.kinds[-1] if kind == "mtp" else kind
    found = Counter(_weights(facts, base, layout.tp, layout.etp))
    local = facts.experts // layout.ep if base == "moe" else 0
    found["experts"] = local * sum(_size(linear, layout.etp) for linear in _expert(facts))
    if kind == "mtp":
        found["mtp"] = _mtp(facts, layout.tp)
    if facts.kv_rank and not facts.q_rank:
        found["norms"] += facts.hidden  # core norms the input of linear_q_proj a second time; no release has that norm
    if run.adapter.kind == "none":
        return found
    lean = run.adapter.kind == "lora" and run.adapter.lean
    found["adapters_dense"] = sum(_adapter(run.adapter, linear, layout.tp, lean) for linear in linears(facts, base))
    # without grouped products experts are modules of their own, and so are their adapters
    each = local if run.adapter.experts == "each" or not run.moe.grouped_gemm else min(local, 1)
    found["adapters_experts"] = each * sum(_adapter(run.adapter, linear, layout.etp) for linear in _expert(facts))
    return found


def _weights(facts: ModelFacts, kind: str, tp: int, etp: int) -> dict[str, int]:
    """Parameters of one dense or MoE layer without its routed experts."""
    norm = facts.hidden * (2 if facts.layernorm else 1)
    query_key = (facts.q_rank + facts.kv_rank if facts.kv_rank else 2 * facts.head_dim) if facts.qk_norm else 0
    if facts.norm_over_heads:
        query_key = (facts.heads + facts.kv_heads) * facts.head_dim
    found = {
        "attention": sum(_size(linear, tp) for linear in _attention(facts)) + (facts.heads // tp if facts.sinks else 0),
        "norms": 2 * norm + query_key * (2 if facts.layernorm else 1),
    }
    if kind == "dense":
        return found | {"mlp": sum(_size(linear, tp) for linear in _mlp(facts.ffn, facts))}
    found["router"] = facts.experts * (facts.hidden + (1 if facts.linear_bias else 0))
    gate = facts.hidden if facts.shared_gate else 0
    return found | {"shared_experts": sum(_size(linear, tp) for linear in _mlp(facts.shared_ffn, facts)) + gate}


def _matrices(run: Run, facts: ModelFacts, kind: str) -> int:
    """Parameters in the matrices of one layer on one rank, without biases, the router and adapters."""
    found = sum(
        count * _size(replace(linear, bias=False), cut)
        for cut, count, some in _low(run, facts, kind)
        for linear in some
    )
    mtp = 2 * facts.hidden * facts.hidden // run.layout.tp
    return found + (mtp if kind == "mtp" and "dense" in _parts(run) else 0)


def _low(run: Run, facts: ModelFacts, kind: str) -> Iterator[tuple[int, int, list[Linear]]]:
    """Matrices of a layer in fewer bits: over how many ranks they are cut, how often they are on one, and which."""
    base, low, layout = facts.kinds[-1] if kind == "mtp" else kind, _parts(run), run.layout
    yield layout.tp, 1, _attention(facts) if "attention" in low else []
    yield layout.tp, 1, _mlp(facts.ffn if base == "dense" else facts.shared_ffn, facts) if "dense" in low else []
    if base == "moe" and "experts" in low:
        yield layout.etp, facts.experts // layout.ep, _expert(facts)


def _parts(run: Run) -> tuple[str, ...]:
    """Parts of the model that are in fewer bits, where anything is."""
    return packed_base.parts(run) if packed_base.format_of(run) else packed_base.PARTS


def _apart(linears: list[Linear], facts: ModelFacts) -> int:
    return sum(2 if facts.gated and linear.name == "linear_fc1" else 1 for linear in linears)


def _attention(facts: ModelFacts) -> list[Linear]:
    hidden, heads, bias = facts.hidden, facts.heads, facts.attention_bias or facts.linear_bias
    if not facts.kv_rank:
        width = heads * facts.head_dim
        return [
            Linear("linear_qkv", hidden, width + 2 * facts.kv_heads * facts.head_dim, bias=bias),
            Linear("linear_proj", width, hidden, "row", bias=facts.linear_bias),
        ]
    query = heads * (facts.qk_nope + facts.qk_rope)
    found = [
        Linear("linear_kv_down_proj", hidden, facts.kv_rank + facts.qk_rope, "whole"),
        Linear("linear_kv_up_proj", facts.kv_rank, heads * (facts.qk_nope + facts.v_head)),
        Linear("linear_proj", heads * facts.v_head, hidden, "row"),
    ]
    if not facts.q_rank:
        return [*found, Linear("linear_q_proj", hidden, query)]
    down = Linear("linear_q_down_proj", hidden, facts.q_rank, "whole")
    return [*found, down, Linear("linear_q_up_proj", facts.q_rank, query)]


def _mlp(width: int, facts: ModelFacts) -> list[Linear]:
    if not width:
        return []
    return [
        Linear("linear_fc1", facts.hidden, width * (2 if facts.gated else 1), bias=facts.linear_bias),
        Linear("linear_fc2", width, facts.hidden, "row", bias=facts.linear_bias),
    ]


def _expert(facts: ModelFacts) -> list[Linear]:
    return _mlp(facts.expert_ffn, facts)


def _mtp(facts: ModelFacts, tp: int) -> int:
    """Parameters that an MTP layer adds: the projection of hidden states and embeddings, and three norms."""
    return 2 * facts.hidden * facts.hidden // tp + 3 * facts.hidden * (2 if facts.layernorm else 1)


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
