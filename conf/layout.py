"""The arithmetic of a parallel layout: which cuts of a model over processes are legal, and what would be instead.

Two grids share the same processes:

    dense layers   tp * cp * pp * dp   = world      dp copies of everything that is not an expert
    experts        etp * ep * pp * edp = world      edp copies of each expert

ep is no factor of the first: tp 2, ep 8, etp 2 on 32 processes gives dp 16 and edp 2.

problems() knows two kinds of rules: those that a configuration can break by itself, checked whenever one is loaded,
and those that need the sizes of the model, checked once its config.json is here. They are megatron-core 0.19's and
Megatron-Bridge 0.6's own, found out before a process is started. Memory is not covered: a legal layout may not fit.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from conf import levers
from conf.facts import ModelFacts
from conf.schema import Layout, Run, Train

# Megatron cuts the input of these layers over tp, that of all others is whole.
ROW_PARALLEL = {"linear_proj", "linear_fc2"}
# The first of two low-rank products is whole on every rank of tp.
WHOLE = {"linear_q_down_proj", "linear_kv_down_proj"}


@dataclass(frozen=True)
class Grid:
    dp: int
    edp: int
    microbatches: int  # per step and data-parallel rank: gradient accumulation, and what fills a pipeline


class Broken(NamedTuple):
    rule: str
    key: str
    text: str
    candidates: Collection[int] = ()  # values of key worth a try


def grid(layout: Layout, train: Train) -> Grid:
    """Takes a legal layout."""
    dp, rest = divmod(layout.world, layout.tp * layout.cp * layout.pp)
    edp, expert_rest = divmod(layout.world, layout.etp * layout.ep * layout.pp)
    microbatches, batch_rest = divmod(train.global_batch, train.micro_batch * dp) if dp else (0, 1)
    assert rest == expert_rest == batch_rest == 0, f"illegal layout: {layout}, {train}"
    return Grid(dp, edp, microbatches)


def packing_multiple(layout: Layout) -> int:
    """What the length of every row of a packed sequence is a multiple of.

    Each row is cut over cp and sp on its own, so each must divide. 16 serves most layouts, which then train on the same
    packed sequences; it costs 8 tokens a row.
    """
    return lcm(16, (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1))


def problems(run: Run, facts: ModelFacts | None = None) -> list[str]:
    """One line per broken rule: key, values, and the nearest values of that key which break no rule that holds now."""
    broken = list(_broken(run, facts))
    return [f"{b.key}: {b.text}{_nearest(run, facts, b, {other.rule for other in broken})}" for b in broken]


def _nearest(run: Run, facts: ModelFacts | None, broken: Broken, rules: set[str]) -> str:
    section, key = broken.key.split(".")
    before = getattr(run, section)
    value = getattr(before, key)

    def legal(candidate: int) -> bool:
        after = run.model_copy(update={section: before.model_copy(update={key: candidate})})
        return {other.rule for other in _broken(after, facts)} <= rules - {broken.rule}

    found = [candidate for candidate in broken.candidates if legal(candidate)]
    below = sorted(candidate for candidate in found if candidate < value)
    above = sorted(candidate for candidate in found if candidate > value)
    near = below[-1:] + above[:1] if below and above else below[-2:] + above[:2]
    return f"; nearest legal: {', '.join(str(n).lower() for n in near)}" if near else ""


def _broken(run: Run, facts: ModelFacts | None) -> Iterator[Broken]:
    whole = list(_broken_grids(run.layout))
    yield from whole
    if not whole:
        yield from _broken_batches(run)
    yield from _broken_sequences(run, moe=facts.experts > 0 if facts else run.layout.ep * run.layout.etp > 1)
    if facts:
        yield from _broken_widths(run, facts)
        yield from _broken_dora(run, facts)
        yield from _broken_stages(run, facts)
        yield from _broken_rest(run, facts)
        yield from _broken_fp8(run, facts)


def _broken_fp8(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout = run.layout
    for key, what, size, least in levers.widths(run, facts):
        step = least * layout.cp * (layout.tp if layout.sp else 1)
        near = _multiples(run.data.seq_length, step) if key == "data.seq_length" else _divisors(layout.world)
        text = f"{what}: {size} is no multiple of {least}, which train.fp8 {run.train.fp8} needs"
        yield Broken(f"fp8 {what}", key, text, near)


def _broken_grids(layout: Layout) -> Iterator[Broken]:
    world, hosts = layout.world, f"{layout.world} processes ({layout.nodes} nodes x {layout.gpus_per_node})"
    strangers = [key for key in ("tp", "cp", "pp", "ep", "etp") if world % getattr(layout, key)]
    for key in strangers:
        text = f"{getattr(layout, key)} does not divide the {hosts}"
        yield Broken(f"{key} divides", f"layout.{key}", text, _divisors(world))
    for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        first, second, third = (getattr(layout, key) for key in axes)
        if world % (first * second * third) and not set(axes) & set(strangers):
            largest = max(axes, key=lambda key: getattr(layout, key))
            product = " * ".join(f"{key} {getattr(layout, key)}" for key in axes)
            text = f"{product} = {first * second * third} does not divide the {hosts}"
            yield Broken(f"grid of {axes}", f"layout.{largest}", text, _divisors(world))


def _broken_batches(run: Run) -> Iterator[Broken]:
    layout, train = run.layout, run.train
    dp = layout.world // (layout.tp * layout.cp * layout.pp)
    row = train.micro_batch * dp
    if train.global_batch % row:
        text = f"{train.global_batch} is no multiple of micro_batch {train.micro_batch} * dp {dp} = {row}"
        yield Broken("batch", "train.global_batch", text, _multiples(train.global_batch, row))
    elif layout.vpp and train.global_batch // row % layout.pp:
        # the interleaved schedule works in groups of pp microbatches
        text = (
            f"{train.global_batch} is {train.global_batch // row} microbatches, with vpp no multiple of pp {layout.pp}"
        )
        yield Broken("interleaving", "train.global_batch", text, _multiples(train.global_batch, row * layout.pp))


def _broken_sequences(run: Run, moe: bool) -> Iterator[Broken]:
    layout, seq_length = run.layout, run.data.seq_length
    if layout.sp and layout.tp == 1:
        yield Broken("sp", "layout.sp", "true cuts over tp, which is 1", [False])
    if moe and layout.tp > 1 and not layout.sp:
        # core's MoELayer.forward raises
        yield Broken(
            "sp of experts", "layout.sp", f"false, but experts train under tp {layout.tp} only with it", [True]
        )
    # cp gives each rank one piece from either end of the sequence, so that causal attention costs all ranks the same
    pieces = lcm(2 * layout.cp if layout.cp > 1 else 1, layout.cp * layout.tp if layout.sp else 1)
    if seq_length % pieces:
        text = f"{seq_length} is no multiple of {pieces}: cp {layout.cp}, tp {layout.tp}, sp {str(layout.sp).lower()}"
        yield Broken("sequence", "data.seq_length", text, _multiples(seq_length, pieces))
    if layout.vpp and layout.pp == 1:
        yield Broken("vpp", "layout.vpp", f"{layout.vpp} stages per pipeline rank need pp > 1")
    for key in ("first_stage_layers", "last_stage_layers"):
        if layout.pp == 1 and getattr(layout, key):
            yield Broken(key, f"layout.{key}", f"{getattr(layout, key)} needs pp > 1")
    if run.data.packed and run.train.micro_batch > 1:
        yield Broken("packed rows", "train.micro_batch", f"{run.train.micro_batch}, but packed data needs 1", [1])


def _broken_widths(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout, adapter = run.layout, run.adapter
    adapted = _adapted(run, facts)
    inside_experts = adapted & {"linear_fc1", "linear_fc2"} if facts.experts else set()
    if not facts.ffn and not facts.shared_ffn:
        adapted -= {"linear_fc1", "linear_fc2"}  # experts are the only MLPs, and those are not cut by tp
    mtp = facts.mtp_layers if run.model.mtp else 0
    cut_by_tp = {
        "attention heads": facts.heads,
        "width of query, key and value": (facts.heads + 2 * facts.kv_heads) * facts.head_dim,
        "vocabulary": facts.padded_vocab(layout.tp),
        "dense layers' width": facts.ffn,
        "shared experts' width": facts.shared_ffn,
        "hidden size, which multi-token prediction cuts": facts.hidden if mtp else 0,
        "hidden size, the output of adapters": facts.hidden if adapted & ROW_PARALLEL else 0,
        "width of the low-rank query": facts.q_rank if "linear_q_down_proj" in adapted else 0,
        "width of the low-rank key-value": facts.kv_rank + facts.qk_rope if "linear_kv_down_proj" in adapted else 0,
        "adapter.rank": adapter.rank if adapted - ROW_PARALLEL else 0,
    }
    cut_by_etp = {
        "experts' width": facts.expert_ffn,
        "hidden size, the output of experts' adapters": facts.hidden if "linear_fc2" in inside_experts else 0,
        "adapter.rank of experts": adapter.rank if "linear_fc1" in inside_experts else 0,
    }
    for key, cuts in (("tp", cut_by_tp), ("etp", cut_by_etp if facts.experts else {})):
        for name, size in cuts.items():
            if size % getattr(layout, key):
                text = f"{getattr(layout, key)} does not divide the {name}, {size}"
                yield Broken(f"{key} {name}", f"layout.{key}", text, _divisors(layout.world))
    if facts.kv_heads % layout.tp and layout.tp % facts.kv_heads:
        text = f"{layout.tp} is neither divisor nor multiple of the {facts.kv_heads} key-value heads"
        yield Broken("kv heads", "layout.tp", text, _divisors(layout.world))
    if facts.experts % layout.ep:
        text = f"{layout.ep} does not divide the {facts.experts} experts"
        yield Broken("experts", "layout.ep", text, _divisors(layout.world))
    for key in ("ep", "etp"):
        if not facts.experts and getattr(layout, key) > 1:
            yield Broken(
                f"{key} of dense", f"layout.{key}", f"{getattr(layout, key)}, but the model has no experts", [1]
            )


def _adapted(run: Run, facts: ModelFacts) -> set[str]:
    """Those of adapter.targets that the model has."""
    latent = {"linear_q_down_proj", "linear_q_up_proj"} if facts.q_rank else {"linear_q_proj"}
    latent |= {"linear_kv_down_proj", "linear_kv_up_proj"}
    there = {"linear_proj", "linear_fc1", "linear_fc2"} | (latent if facts.kv_rank else {"linear_qkv"})
    return there & set(run.adapter.targets) if run.adapter.kind != "none" else set()


def _broken_dora(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    """What the norms of DoRA's weights have no place for."""
    layout, adapted = run.layout, _adapted(run, facts)
    if run.adapter.kind != "dora":
        return
    if facts.experts and adapted & {"linear_fc1", "linear_fc2"}:
        if run.moe.grouped_gemm:
            # Bridge's DoRALinear takes the norm of one weight, a grouped layer has one per expert
            yield Broken(
                "dora", "adapter.kind", "dora fits no grouped experts; leave linear_fc1 and linear_fc2 out of targets"
            )
        elif layout.ep > 1:
            # Bridge does not mark their adapters as experts', so that gradients of different experts are added up
            text = (
                f"{layout.ep}, but dora trains experts wrongly over ep; leave linear_fc1 and linear_fc2 out of targets"
            )
            yield Broken("dora of experts over ep", "layout.ep", text, [1])
        elif layout.etp != layout.tp:
            # Bridge cuts an expert's adapter over tp, and its ranks then see different tokens
            text = f"{layout.etp}, but dora cuts the adapters of experts by tp, {layout.tp}"
            yield Broken("dora of experts", "layout.etp", text, [layout.tp])
    if layout.sp and run.adapter.dropout and adapted - ROW_PARALLEL:
        # Bridge sends the input, gathered over tp, through the base layer, which gathers it again
        text = f"{run.adapter.dropout}, but dora under sp takes none"
        yield Broken("dora dropout", "adapter.dropout", text, [0])
    if whole := sorted(adapted & WHOLE) if layout.tp > 1 else []:
        text = (
            f"dora fits no {whole[0]} under tp {layout.tp}, each rank of which holds it whole; leave it out of targets"
        )
        yield Broken("dora of whole layers", "adapter.kind", text)


def _broken_rest(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout, train = run.layout, run.train
    if layout.cp > 1 and facts.angles % (2 * layout.cp):
        text = f"{layout.cp} does not cut the {facts.angles} rotations of latent attention into 2 pieces each"
        yield Broken("angles", "layout.cp", text, _divisors(layout.world))
    if facts.positions and run.data.seq_length > facts.positions:
        text = f"{run.data.seq_length}, but the model has learned {facts.positions} positions"
        yield Broken("positions", "data.seq_length", text, [facts.positions])
    if facts.experts and run.moe.dispatcher == "flex" and layout.ep * layout.etp == 1:
        yield Broken("flex", "moe.dispatcher", "flex needs experts spread over ranks, and ep * etp is 1; take alltoall")
    if train.recompute == "selective" and "mla_up_proj" in train.recompute_modules and not facts.kv_rank:
        text = "mla_up_proj is none of this model's layers, which has no latent attention"
        yield Broken("mla_up_proj", "train.recompute_modules", text)


def _broken_stages(run: Run, facts: ModelFacts) -> Iterator[Broken]:
    layout, vpp = run.layout, run.layout.vpp or 1
    counts = shares(layout, facts.layers)
    if not counts and (layout.first_stage_layers or layout.last_stage_layers):
        key = "first_stage_layers" if layout.first_stage_layers else "last_stage_layers"
        ends = f"first {layout.first_stage_layers or 'even'} and last {layout.last_stage_layers or 'even'}"
        text = (
            f"{ends} do not add up to {facts.layers} layers with the same number on each other of the {layout.pp} ranks"
        )
        yield Broken("stages", f"layout.{key}", text, range(1, facts.layers))
    elif not counts:
        text = f"{layout.pp} ranks do not share {facts.layers} layers evenly (or set first_ and last_stage_layers)"
        yield Broken("stages", "layout.pp", text, _divisors(layout.world))
    elif layout.vpp and layout.pp == 2 and layout.first_stage_layers and layout.last_stage_layers:
        text = f"{layout.vpp}, but core divides by the number of stages between the first and the last, which is 0"
        yield Broken("nothing between", "layout.vpp", f"{text}; set one of the two")
    elif any(count % vpp for count in counts):
        text = f"{vpp} does not divide the layers of each pipeline rank, {', '.join(map(str, sorted(set(counts))))}"
        yield Broken("virtual stages", "layout.vpp", text, range(2, max(counts) + 1))
    if layout.vpp and not counts and facts.layers % (layout.pp * vpp):
        text = f"pp {layout.pp} * vpp {vpp} = {layout.pp * vpp} stages do not share {facts.layers} layers"
        yield Broken("stages in all", "layout.vpp", text)
    if facts.mtp_layers and run.model.mtp and run.train.recompute == "full" and run.train.recompute_layers > 1:
        text = f"{run.train.recompute_layers}, but multi-token-prediction layers are recomputed one by one"
        yield Broken("mtp recompute", "train.recompute_layers", text, [1])


def shares(layout: Layout, layers: int) -> list[int]:
    """Layers of each pipeline rank; empty if they do not come out even."""
    first, last = ([count] if count else [] for count in (layout.first_stage_layers, layout.last_stage_layers))
    middle = layout.pp - len(first) - len(last)
    rest = layers - sum(first) - sum(last)
    if middle <= 0:
        return first + last if middle == rest == 0 else []
    return [*first, *[rest // middle] * middle, *last] if rest > 0 and rest % middle == 0 else []


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _multiples(near: int, step: int) -> list[int]:
    return [step * n for n in range(max(1, near // step - 8), near // step + 9)]
