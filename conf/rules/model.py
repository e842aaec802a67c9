"""Rules of a layout that need the model's sizes, from megatron-core 0.19 and Megatron-Bridge 0.6.

broken(run, facts) yields the broken rules. conf/rules/layout.py has the rules that need no model, and formats both.
"""

import functools
from collections.abc import Collection, Iterator, Mapping
from math import gcd
from types import MappingProxyType
from typing import Any, NamedTuple

from conf import families
from conf.error_lines import show
from conf.model_facts import ModelFacts
from conf.rules import packed_base, precision
from conf.schema.run import Layout, Run
from conf.schema.training import Moe

# Megatron cuts the input of these layers over tp; the input of all others is complete.
ROW_PARALLEL = {"linear_proj", "linear_fc2", "out_proj"}
# Keys of section moe about the router, which a dense model lacks.
ROUTING = ("aux_loss_coeff", "z_loss_coeff", "balance", "force_balance", "freeze_router")
# Layers that are complete on every rank of tp: the first of two low-rank products, and those around routed experts.
WHOLE = {"linear_q_down_proj", "linear_kv_down_proj", "fc1_latent_proj", "fc2_latent_proj"}


class Broken(NamedTuple):
    rule: str
    key: str
    text: str
    candidates: Collection[Any] = ()  # values of the key to try; if they are not numbers, the best first
    others: Mapping[str, Collection[Any]] = MappingProxyType({})  # the same for other keys, the best first


def broken(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    for rules in (_widths, _dora, _stages, _rest, _fp8, _packed, _biases_and_windows, _balancing):
        yield from rules(run, facts)


def shares(layout: Layout, layers: int) -> list[int]:
    """Numbers of layers of each pipeline rank; empty if the layers cannot be divided evenly."""
    first, last = ([count] if count else [] for count in (layout.first_stage_layers, layout.last_stage_layers))
    middle = layout.pp - len(first) - len(last)
    rest = layers - sum(first) - sum(last)
    if middle <= 0:
        return first + last if middle == rest == 0 else []
    return [*first, *[rest // middle] * middle, *last] if rest > 0 and rest % middle == 0 else []


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def multiples(near: int, step: int) -> list[int]:
    return [step * n for n in range(max(1, near // step - 8), near // step + 9)]


def _widths(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout, adapter = run.layout, run.adapter
    there = adapted(run, facts)
    inside_experts = there & {"linear_fc1", "linear_fc2"} if facts.experts else set()
    if not facts.ffn and not facts.shared_ffn:
        there -= {"linear_fc1", "linear_fc2"}  # experts are the only MLPs, and tp does not cut them
    mtp = facts.mtp_layers if run.model.mtp else 0
    cut_by_tp = {
        "attention heads": facts.heads,
        "width of query, key and value": gcd(*(of.qkv for of in facts.variants)),
        "vocabulary": facts.padded_vocab(layout.tp),
        "dense layers' width": facts.ffn,
        "shared experts' width": facts.shared_ffn,
        "hidden size, which multi-token prediction cuts": facts.hidden if mtp else 0,
        "hidden size, the output of adapters": facts.hidden if there & ROW_PARALLEL else 0,
        "width of the low-rank query": facts.q_rank if "linear_q_down_proj" in there else 0,
        "width of the low-rank key-value": facts.kv_rank + facts.qk_rope if "linear_kv_down_proj" in there else 0,
        facts.delta.noun if facts.delta else "": facts.delta.key_heads if facts.delta else 0,
        "adapter.rank": adapter.rank if there - ROW_PARALLEL else 0,
    }
    cut_by_etp = {
        "experts' width": facts.expert_ffn,
        "hidden size, the output of experts' adapters": facts.hidden if "linear_fc2" in inside_experts else 0,
        "adapter.rank of experts": adapter.rank if "linear_fc1" in inside_experts else 0,
    }
    for key, cuts in (("tp", cut_by_tp), ("etp", cut_by_etp if facts.experts else {})):
        for name, size in cuts.items():
            if size % getattr(layout, key):
                degree = getattr(layout, key)
                text = f"{degree} does not divide the {name}, {size}"
                others = {"adapter.rank": sorted(multiples(size, degree), key=lambda n: abs(n - size))}
                ranked = others if name.startswith("adapter.rank") else {}
                yield Broken(f"{key} {name}", f"layout.{key}", text, divisors(layout.world), ranked)
    for of in facts.variants:
        if of.kv_heads % layout.tp and (layout.tp % of.kv_heads or (of.keys and not of.values)):
            only = "is neither divisor nor multiple of" if of.values else "does not divide"
            text = f"{layout.tp} {only} the {of.kv_heads} key-value heads"
            yield Broken("kv heads", "layout.tp", text, divisors(layout.world))
    if facts.norm_over_heads and facts.kv_heads % layout.tp:
        text = f"{layout.tp}, but keys are normed over all {facts.kv_heads} heads, which it does not divide"
        yield Broken("norms over all heads", "layout.tp", text, divisors(layout.world))
    yield from _delta_nets(run, facts, there)
    if facts.experts % layout.ep:
        text = f"{layout.ep} does not divide the {facts.experts} experts"
        yield Broken("experts", "layout.ep", text, divisors(layout.world))
    for key in ("ep", "etp"):
        if not facts.experts and getattr(layout, key) > 1:
            text = f"{getattr(layout, key)}, but the model has no experts"
            yield Broken(f"{key} of dense", f"layout.{key}", text, [1])


def _delta_nets(run: Run, facts: ModelFacts, there: set[str]) -> Iterator[Broken]:
    layout, adapter, net = run.layout, run.adapter, facts.delta
    if net and net.key_heads % (layout.tp * layout.cp):
        text = f"{layout.cp}, but tp * cp does not divide the {net.key_heads} {net.noun}"
        yield Broken("heads", "layout.cp", text, divisors(layout.world))
    if "in_proj" in there and layout.tp > 1 and not (adapter.kind == "lora" and adapter.lean):
        # Bridge saves B by ranks of tp; each of them has rows of all projections of in_proj
        text = f"{layout.tp}, but the adapter of in_proj can be cut only by lora with adapter.lean"
        yield Broken("adapter of in_proj", "layout.tp", text, [1])


def adapted(run: Run, facts: ModelFacts) -> set[str]:
    """The names of adapter.targets that the model has."""
    return _parts(facts) & set(run.adapter.names) if run.adapter.kind != "none" else set()


@functools.cache
def _parts(facts: ModelFacts) -> set[str]:
    """Return the names of all layers with a matrix, as in adapter.targets."""
    tensors = (tensor for kind in {*facts.kinds} for tensor in families.layer(facts, kind))
    return {tensor.part for tensor in tensors if tensor.matrix}


def _dora(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    """Yield rules for layers on which DoRA's norms of weights do not work."""
    layout, there = run.layout, adapted(run, facts)
    targets = tuple(name for name in run.adapter.names if name in there)
    if run.adapter.kind != "dora":
        return
    if facts.experts and (inside := there & {"linear_fc1", "linear_fc2"}):
        without = {"adapter.targets": _without(targets, {"linear_fc1", "linear_fc2"})}
        if run.moe.grouped_gemm:
            # Bridge's DoRALinear takes the norm of one weight, a grouped layer has one per expert
            text = f"dora fits no grouped experts, whose {' and '.join(sorted(inside))} adapter.targets names"
            yield Broken("dora", "adapter.kind", text, ["lora"], without)
        elif layout.ep > 1:
            # Bridge does not mark their adapters as those of experts, and sums gradients of different experts
            text = f"{layout.ep}, but dora trains experts wrongly over ep"
            yield Broken("dora of experts over ep", "layout.ep", text, [1], without)
        elif layout.etp != layout.tp:
            # Bridge cuts an expert's adapter over tp, and its ranks then see different tokens
            text = f"{layout.etp}, but dora cuts the adapters of experts by tp, {layout.tp}"
            yield Broken("dora of experts", "layout.etp", text, [layout.tp], without)
    if layout.sp and run.adapter.dropout and there - ROW_PARALLEL:
        # Bridge sends the input, gathered over tp, through the base layer, which gathers it again
        text = f"{run.adapter.dropout}, but dora under sp takes none"
        yield Broken("dora dropout", "adapter.dropout", text, [0.0])
    if layout.tp > 1 and (whole := sorted(there & WHOLE)):
        text = f"dora fits no {' and '.join(whole)} under tp {layout.tp}, each rank of which holds them whole"
        without = {"adapter.targets": _without(targets, WHOLE)}
        yield Broken("dora of whole layers", "adapter.kind", text, ["lora"], without)


def _without(values: tuple[Any, ...], gone: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return the rest of a list as the only candidate; no candidate if nothing is left."""
    left = tuple(value for value in values if value not in gone)
    return [left] if left else []


def _rest(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout, train = run.layout, run.train
    if run.adapter.kind != "none" and run.adapter.rank > facts.hidden:
        text = f"{run.adapter.rank} is above the model's hidden size, {facts.hidden}: such an adapter saves nothing"
        yield Broken("rank", "adapter.rank", text, [facts.hidden])
    if layout.cp > 1 and facts.angles % (2 * layout.cp):
        text = f"{layout.cp} does not cut the {facts.angles} rotations of latent attention into 2 pieces each"
        yield Broken("angles", "layout.cp", text, divisors(layout.world))
    if facts.positions and run.data.seq_length > facts.positions:
        text = f"{run.data.seq_length}, but the model has learned {facts.positions} positions"
        yield Broken("positions", "data.seq_length", text, [facts.positions])
    if facts.experts and run.moe.dispatcher == "flex" and layout.ep * layout.etp == 1:
        text = f"flex needs experts spread over ranks, and ep {layout.ep} * etp {layout.etp} is 1"
        yield Broken("flex", "moe.dispatcher", text, ["alltoall"])
    modules = train.recompute_modules if train.recompute == "selective" else ()
    for module, there, lack in (
        ("mla_up_proj", facts.kv_rank, "has no latent attention"),
        ("moe_act", facts.experts, "has no experts"),
    ):
        if module in modules and not there:
            text = f"{module} is none of this model's layers, which {lack}"
            left = _without(modules, {module}) or [("layernorm",)]  # every model has norms
            yield Broken(module, "train.recompute_modules", text, left)


def _stages(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout, vpp = run.layout, run.layout.vpp or 1
    counts, each = shares(layout, facts.layers), facts.layers / layout.pp
    last = {"layout.last_stage_layers": sorted(range(1, facts.layers), key=lambda n: abs(n - each))}
    if not counts and (layout.first_stage_layers or layout.last_stage_layers):
        key = "first_stage_layers" if layout.first_stage_layers else "last_stage_layers"
        ends = f"first {layout.first_stage_layers or 'even'} and last {layout.last_stage_layers or 'even'}"
        others = f"the same number on each other of the {layout.pp} ranks"
        text = f"{ends} do not add up to {facts.layers} layers with {others}"
        yield Broken("stages", f"layout.{key}", text, range(1, facts.layers))
    elif not counts:
        text = f"{layout.pp} ranks do not share {facts.layers} layers evenly"
        yield Broken("stages", "layout.pp", text, divisors(layout.world), last)
    elif layout.vpp and layout.pp == 2 and layout.first_stage_layers and layout.last_stage_layers:
        text = f"{layout.vpp}, but core divides by the number of stages between the first and the last, which is 0"
        yield Broken("nothing between", "layout.vpp", text, [None], {"layout.last_stage_layers": [None]})
    elif any(count % vpp for count in counts):
        text = f"{vpp} does not divide the layers of each pipeline rank, {', '.join(map(str, sorted(set(counts))))}"
        yield Broken("virtual stages", "layout.vpp", text, [*range(2, max(counts) + 1), None])
    if layout.vpp and not counts and facts.layers % (layout.pp * vpp):
        text = f"pp {layout.pp} * vpp {vpp} = {layout.pp * vpp} stages do not share {facts.layers} layers"
        yield Broken("virtual stages", "layout.vpp", text, [*range(2, facts.layers // layout.pp + 1), None])
    if facts.mtp_layers and run.model.mtp and run.train.recompute == "full" and run.train.recompute_layers > 1:
        text = f"{run.train.recompute_layers}, but multi-token-prediction layers are recomputed one by one"
        yield Broken("mtp recompute", "train.recompute_layers", text, [1])
    if facts.mtp_layers and run.model.mtp and facts.tied and layout.pp > 1:
        text = f"{layout.pp}, but core cannot save a tied output layer on a stage with multi-token prediction"
        yield Broken("tied mtp", "layout.pp", text, [1], {"model.mtp": [False]})


def _fp8(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout = run.layout
    for key, what, size, least in precision.widths(run, facts):
        step = least * layout.cp * (layout.tp if layout.sp else 1)
        near = multiples(run.data.seq_length, step) if key == "data.seq_length" else divisors(layout.world)
        text = f"{what}: {size} is no multiple of {least}, which train.fp8 {run.train.fp8} needs"
        yield Broken(f"fp8 {what}", key, text, near)


def _packed(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    for part in packed_base.missing(run, facts):
        yield Broken(f"{part} to pack", "model.pack", f"{part}, but the model has none of them; leave it out, or null")
    for key, what, size, least in packed_base.widths(run, facts):
        text = f"{what}: {size} is no multiple of {least}, which model.base {run.model.base} needs"
        others = ["fp8", "bf16"] if key == "model.base" else divisors(run.layout.world)
        yield Broken(f"packed {what}", key, text, others)
    form = packed_base.format_of(run)
    if facts.delta_layers and form and form.factor_bytes and "attention" in packed_base.parts(run):
        text = f"{run.model.base}, but projections of gated delta nets, which are one matrix here, would share a factor"
        yield Broken("factor of projections", "model.base", text, ["fp8", "int4", "mxfp4"])


def _balancing(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    """Yield keys of routing that are set for a dense model, which has no router."""
    for key in ROUTING if not facts.experts else ():
        default = Moe.model_fields[key].default
        value = getattr(run.moe, key)
        if value and value not in (default, "none"):  # 0 and none describe a dense model
            yield Broken(f"{key} of dense", f"moe.{key}", f"{show(value)}, but the model has no experts", [default])


def _biases_and_windows(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    """Yield rules for experts with biases, and for attention with sinks or windows."""
    layout = run.layout
    if facts.experts and facts.linear_bias:
        if layout.etp > 1:
            # each rank of an expert would add the whole bias; core refuses it too
            text = f"{layout.etp}, but experts with biases are whole on a rank"
            yield Broken("biases of experts", "layout.etp", text, [1])
        if not run.moe.grouped_gemm:
            text = "false, but experts with biases were tried only in grouped products"
            yield Broken("biases of single experts", "moe.grouped_gemm", text, [True])
    if facts.experts and facts.linear_bias and run.reinforce.steps:
        text = f"{run.reinforce.steps}, but Megatron-Bridge cannot merge adapters of stacked experts to send them"
        yield Broken("rewards of stacks", "reinforce.steps", text, [0])
    if layout.cp > 1 and run.data.packed and max(of.head_dim for of in facts.variants) > 128:
        text = f"{layout.cp}, but the kernel for packed rows with heads wider than 128 needs whole rows"
        yield Broken("wide heads over cp", "layout.cp", text, [1], {"data.packed": [False]})
    if (facts.borrowing or facts.per_layer) and layout.pp > 1:
        text = f"{layout.pp}, but layers use keys, values or embeddings of the first pipeline stage"
        yield Broken("layers that share", "layout.pp", text, [1])
    if run.train.recompute == "full" and (facts.borrowing or (facts.per_layer and run.adapter.kind == "none")):
        text = "full, but gradients of keys, values or embeddings that layers share would be lost"
        yield Broken("layers that share", "train.recompute", text, ["none", "selective"])
    if facts.windows and layout.cp > 1:
        text = f"{layout.cp}, but keys that pass through a ring of ranks meet neither sinks nor windows"
        yield Broken("windows over cp", "layout.cp", text, [1])
