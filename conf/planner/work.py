"""Work of a rank for one layer and one microbatch: FLOPs, bytes moved, and bytes exchanged with other ranks.

    products(run, facts, kind)    matrix products: their sizes on one rank, and whether their weight is trained
    attention(run, facts, kind)   FLOPs of attention's products of tokens, forward; causal, so half of the square
    moved(run, facts, kind, products)
                                  bytes that norms, activation functions, rotations and permutations read and write,
                                  each as one kernel
    exchanged(run, facts, kind)   bytes of the layer's collectives, forward, by dimension
    calls(run, facts, kind)       numbers of the layer's collectives, forward and backward
    adapters(run, facts, kind)    number of the layer's adapters

Not covered: packed rows: attention starts at the first token of each row and costs less than computed here.
"""

from typing import NamedTuple

from conf.model_facts import ModelFacts
from conf.planner import parameters
from conf.planner.activations import DELTA_CHUNK, attention_width, tokens
from conf.planner.parameters import Linear
from conf.rules.model import adapted
from conf.schema.run import Run
from conf.schema.sections import Adapter

ROWS = ("linear_proj", "out_proj", "linear_fc2")  # layers that tp cuts by rows
# Parts of the products, by the kind of the weight and, for latent attention, by the layer.
PARTS = {"attention": "attention", "mtp": "mtp", "mlp": "mlp", "shared_experts": "shared experts"}
LATENT = {"linear_kv_up_proj": "latent", "linear_q_up_proj": "latent"}
CUT_INSIDE = ("linear_qkv", "in_proj", "linear_fc1")  # layers whose adapters have a part of the rank on each rank of tp


class Product(NamedTuple):
    """A matrix product: [m, k] times [k, n], `batch` times."""

    part: str
    m: float
    n: int
    k: int
    batch: int = 1
    trained: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch


class Move(NamedTuple):
    name: str  # kind of kernel; conf/planner/rates.py has the rates
    forward: float  # bytes
    backward: float


def products(run: Run, facts: ModelFacts, kind: str) -> list[Product]:
    t, found = tokens(run, facts), list[Product]()
    for of, part in PARTS.items():
        for linear in parameters.linears(facts, kind, (of,)):
            rows = t.local if linear.cut == "whole" else t.whole
            found += _linear(run.adapter, linear, LATENT.get(linear.name, part), rows, run.layout.tp)
    if experts := parameters.linears(facts, kind, ("experts",)):
        routes = _full(run.adapter) and not run.moe.freeze_router
        found.append(Product("router", t.local, facts.experts, facts.hidden, 1, routes))
        for linear in experts:
            local = facts.experts // run.layout.ep
            found += _linear(run.adapter, linear, "experts", t.routed, run.layout.etp, local)
    return found


def adapters(run: Run, facts: ModelFacts, kind: str) -> int:
    """Return the number of the layer's matrices that have an adapter. All routed experts count as one matrix."""
    if _full(run.adapter):
        return 0
    return sum(linear.name in run.adapter.names for linear in parameters.linears(facts, kind, (*PARTS, "experts")))


def output(run: Run, facts: ModelFacts) -> list[Product]:
    """Return the products that compute the logits, of the model and of each MTP layer."""
    t = tokens(run, facts)
    width = facts.padded_vocab(run.layout.tp) // run.layout.tp
    one = Product("logits", t.whole, width, facts.hidden, 1, _full(run.adapter))
    return [one] * (1 + (facts.mtp_layers if run.model.mtp else 0))


def attention(run: Run, facts: ModelFacts, kind: str) -> float:
    t = tokens(run, facts)
    if net := facts.delta_of(kind):  # products of a chunk's tokens, and of tokens and a head's state
        states, pairs = (2, 1) if net.scan else (3, 2)
        each = states * net.key * net.value + DELTA_CHUNK * pairs * (net.key + net.value)
        return 2.0 * t.whole * net.value_heads * each / run.layout.tp
    if not facts.attends(kind):
        return 0.0
    width = facts.qk_nope + facts.qk_rope + facts.v_head if facts.kv_rank else 2 * facts.of(kind).head_dim
    return 2.0 * t.whole * run.data.seq_length * facts.heads * width / run.layout.tp / 2


def moved(run: Run, facts: ModelFacts, kind: str, products: list[Product]) -> list[Move]:
    facts = facts.of(kind)
    t, tp = tokens(run, facts), run.layout.tp
    gate = 2 if facts.gated else 1
    row, blocks = t.local * facts.hidden, facts.blocks_in(kind)
    numbers: list[tuple[str, float, float]] = [
        ("norm", blocks * row * 2, blocks * row * 3),
        ("add", blocks * row * 3, blocks * row * 3),  # residual sums
    ]
    if net := facts.delta_of(kind):
        # the convolution, norms, gates and copies of heads: kernels that read and write what in_proj makes
        size = t.whole * (net.keys + net.values) / tp * 14
        numbers.append(("rotate", size, 2 * size))
    elif facts.attends(kind) and not facts.positions:
        # q, k and v: made contiguous, rotated, and normed if the model has these norms; each reads and writes
        size = t.whole * attention_width(facts) / tp * (6 if facts.qk_norm else 4)
        numbers.append(("rotate apart" if facts.kv_rank else "rotate", size, size))
    if run.train.fp8 in ("current", "blockwise") and (facts.attention_bias or facts.linear_bias):
        # the gradient of a bias is summed before the gradient is quantized; otherwise a product does both
        numbers.append(("add", 0, t.whole * attention_width(facts) / tp))
    if run.layout.cp > 1 and facts.mixes(kind):
        # q, k and v are cut into two pieces and joined; the outputs of each step of the ring are summed in fp32
        steps = t.whole * facts.heads * (facts.v_head if facts.kv_rank else facts.head_dim) / tp * run.layout.cp
        joined = t.whole * attention_width(facts) / tp * 4 + steps * (1 + 2 + 2)
        numbers.append(("add", joined, joined))

    def activation(name: str, size: float) -> tuple[str, float, float]:
        return name, size * (gate + 1), size * (2 * gate + 1)

    if facts.dense(kind):
        numbers.append(activation("activation", t.whole * facts.ffn / tp))
    if facts.routed(kind):
        # tokens are permuted and sorted by expert, and both is undone; each reads and writes them
        sent = t.busiest * 8 * facts.expert_hidden
        numbers += [("permute", sent, sent), ("add", 3 * row, 3 * row)]
        numbers += [activation("weighted activation", t.busiest * facts.expert_ffn / run.layout.etp)]
        numbers += [activation("shared activation", t.whole * facts.shared_ffn / tp)]
        if run.train.fp8:  # the tokens of experts are padded, and the padding is removed
            numbers.append(("add", sent / 2, sent / 2))
    for product in products:
        if product.part == "adapters":
            rows, outer = product.m * product.batch, product.k > run.adapter.rank
            # B's output and A's gradient are added: read twice and written; dropout reads and writes A's input
            drops = 2.5 * product.k * (run.adapter.dropout > 0) * outer
            forward, backward = drops + 3 * product.n * (not outer), drops + 3 * product.k * outer
            numbers.append(("add", rows * forward, rows * backward))
    return [Move(name, forward * t.byte, backward * t.byte) for name, forward, backward in numbers]


def exchanged(run: Run, facts: ModelFacts, kind: str) -> dict[str, float]:
    """Return the bytes of the layer's collectives by dimension.

    For tp and etp these are the complete gathered or scattered tensors, for the others the bytes that one rank sends.
    """
    t, layout, adapters = tokens(run, facts), run.layout, run.adapter
    row = t.whole * facts.hidden * t.byte
    blocks = facts.cut_blocks(kind)
    # an adapter of a row-parallel layer gathers its output's columns
    rows = sum(name in adapters.names for name in ROWS[:blocks])
    found = {"tp": row * (2 * blocks + (rows if adapters.kind != "none" else 0)) if layout.tp > 1 else 0.0}
    width = 2 * facts.kv_heads * facts.head_dim / min(layout.tp, facts.kv_heads)
    if facts.kv_rank:
        width = facts.heads * (facts.qk_nope + facts.qk_rope + facts.v_head) / layout.tp
    found["cp"] = t.whole * width * t.byte * (layout.cp - 1) * facts.mixes(kind)
    if net := facts.delta_of(kind):  # what in_proj makes goes to ranks with other heads, the output back
        found["cp"] = t.whole * (2 * net.keys + 3 * net.values) / layout.tp * t.byte * (layout.cp > 1)
    if facts.routed(kind):
        sent = t.local * facts.top_k * facts.expert_hidden
        found["ep"] = 2.0 * sent * t.byte if layout.ep > 1 else 0.0  # there and back
        # there in the model's precision, back summed in fp32
        found["etp"] = float(t.routed * facts.expert_hidden * (t.byte + 4)) if layout.etp > 1 else 0.0
    return found


def calls(run: Run, facts: ModelFacts, kind: str) -> tuple[int, int]:
    """Return the numbers of the layer's collectives, forward and backward. Each exchange of cp's ring counts as one."""
    layout, adapter = run.layout, run.adapter
    routed, cut = facts.routed(kind), facts.cut_blocks(kind)
    forward = backward = 0
    if layout.tp > 1:
        names = adapted(run, facts) & {linear.name for linear in parameters.linears(facts, kind)}
        # each layer gathers before and scatters after, and again to compute the gradients of weights
        forward, backward = 2 * cut, (3 if _full(adapter) else 2) * cut
        # an adapter sums or gathers A's output; an adapter of a row-parallel layer also gathers its own output
        adapters = 0 if _full(adapter) else sum(2 if name in ROWS else 1 for name in names)
        forward, backward = forward + adapters, backward + adapters
    if layout.cp > 1 and facts.mixes(kind):
        forward, backward = forward + 2 * (layout.cp - 1), backward + 4 * (layout.cp - 1)
    if routed and layout.ep > 1:
        # tokens and their weights there, results back; and before that, counts of tokens
        forward, backward = forward + 4, backward + 3
        if not _full(adapter) and adapter.experts == "shared":  # the gradients of A and B are summed at once
            backward += 2 * sum(name in adapter.names for name in ("linear_fc1", "linear_fc2"))
    if routed and layout.etp > 1:
        forward, backward = forward + 2, backward + 2
    return forward, backward


def _full(adapter: Adapter) -> bool:
    return adapter.kind == "none"


def _linear(adapter: Adapter, linear: Linear, part: str, rows: float, cut: int, batch: int = 1) -> list[Product]:
    """Return the products of a layer of `cut` ranks, and those of its adapter, A and B."""
    n, k = linear.out // (cut if linear.cut == "column" else 1), linear.into // (cut if linear.cut == "row" else 1)
    found = [Product(part, rows / batch, n, k, batch, _full(adapter))]
    if not _full(adapter) and linear.name in adapter.names:
        inner = adapter.rank // (cut if linear.name in CUT_INSIDE else 1)
        found += [Product("adapters", rows / batch, inner, k, batch)]
        found += [Product("adapters", rows / batch, n, adapter.rank, batch)]
    return found
