"""Arithmetic of a parallel layout: rules for cutting a model over processes, and the nearest legal values.

Two grids share the same processes:

    dense layers   tp * cp * pp * dp   = world      dp copies of everything that is not an expert
    experts        etp * ep * pp * edp = world      edp copies of each expert

ep is not a factor of the first product: tp 2, ep 8, etp 2 on 32 processes gives dp 16 and edp 2.

problems() has two kinds of rules: those on the configuration alone, checked when it is loaded, and those that need the
sizes of the model (conf/rules/model.py), checked when its config.json is available. They are the rules of megatron-core
0.19 and Megatron-Bridge 0.6, checked before a process starts. Memory is not covered: a legal layout may not fit.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from conf.model_facts import ModelFacts
from conf.rules.model import Broken, broken, divisors, multiples
from conf.schema.run import Layout, Run, Train

NONE = object()  # a missing value, different from None


@dataclass(frozen=True)
class Grid:
    dp: int
    edp: int
    microbatches: int  # per step and data-parallel rank: for gradient accumulation and to fill a pipeline


def grid(layout: Layout, train: Train) -> Grid:
    """Sizes of the grids of a legal layout."""
    dp, rest = divmod(layout.world, layout.tp * layout.cp * layout.pp)
    edp, expert_rest = divmod(layout.world, layout.etp * layout.ep * layout.pp)
    microbatches, batch_rest = divmod(train.global_batch, train.micro_batch * dp) if dp else (0, 1)
    assert rest == expert_rest == batch_rest == 0, f"illegal layout: {layout}, {train}"
    return Grid(dp, edp, microbatches)


def packing_multiple(layout: Layout) -> int:
    """The number that must divide the length of every row of a packed sequence, as cp and sp cut each row separately.

    With 16 most layouts train on the same packed sequences; it costs 8 tokens per row.
    """
    return lcm(16, (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1))


def problems(run: Run, facts: ModelFacts | None = None, suggest: bool = True) -> list[str]:
    """Return a line per broken rule: key, values, and the nearest values of that key or another that satisfy the rule.

    A suggestion breaks no further rule, and changes at most two keys; conf/planner/search.py finds complete layouts.
    Finding suggestions takes longer than finding broken rules.
    """
    problems = list(_broken(run, facts))
    rules = {problem.rule for problem in problems}
    return [
        f"{problem.key}: {problem.text}{_suggestion(run, facts, problem, rules) if suggest else ''}"
        for problem in problems
    ]


def _suggestion(run: Run, facts: ModelFacts | None, broken: Broken, rules: set[str]) -> str:
    keep = rules - {broken.rule}
    value = _get(run, broken.key)
    near = list(_legal(run, facts, broken.key, broken.candidates, keep))
    numbers = sorted(number for number in near if isinstance(number, int | float) and not isinstance(value, bool))
    if numbers and value is not None:
        below, above = [number for number in numbers if number < value], [n for n in numbers if n > value]
        near = below[-1:] + above[:1] if below and above else below[-2:] + above[:2]
    text = f"; nearest legal: {', '.join(map(_show, near[:2]))}" if near else ""
    others = []
    for key, candidates in broken.others.items():
        if (other := next(_legal(run, facts, key, candidates, keep), NONE)) is not NONE:
            others.append(f"{key} {_show(other)}")
    if not near and not others:
        others = _two_at_once(run, facts, broken, keep)
    return f"{text}; {'or' if text else 'legal with'} {' or '.join(others)}" if others else text


def _legal(run: Run, facts: ModelFacts | None, key: str, candidates: Collection[Any], keep: set[str]) -> Iterator[Any]:
    """Other values that break no rules except those of `keep`."""
    for candidate in candidates:
        rules = {broken.rule for broken in _broken(_with(run, key, candidate), facts)}
        if candidate != _get(run, key) and rules <= keep:
            yield candidate


def _two_at_once(run: Run, facts: ModelFacts | None, broken: Broken, keep: set[str]) -> list[str]:
    """The nearest value that breaks exactly one other rule, with a value of another key that satisfies that rule."""
    for key, candidates in {broken.key: broken.candidates, **broken.others}.items():
        for candidate in _by_distance(candidates, _get(run, key)):
            half = _with(run, key, candidate)
            fresh = [other for other in _broken(half, facts) if other.rule not in keep]
            if len(fresh) != 1 or fresh[0].rule == broken.rule or fresh[0].key == key:
                continue
            second = fresh[0].key
            rest = _by_distance(fresh[0].candidates, _get(half, second))
            if (other := next(_legal(half, facts, second, rest, keep), NONE)) is not NONE:
                return [f"{key} {_show(candidate)} and {second} {_show(other)}"]
    return []


def _by_distance(candidates: Collection[Any], value: Any) -> list[Any]:
    """Sort numbers by their distance to the value; other candidates keep their order."""
    numbers = all(isinstance(number, int | float) for number in (*candidates, value))
    return sorted(candidates, key=lambda number: abs(number - value)) if numbers else list(candidates)


def _with(run: Run, key: str, value: Any) -> Run:
    section, _, name = key.partition(".")
    return run.changed(**{section: {name: value}})


def _get(run: Run, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(run, section), name)


def _show(value: Any) -> str:
    """A value in YAML."""
    return json.dumps(value).replace('"', "")


def _broken(run: Run, facts: ModelFacts | None) -> Iterator[Broken]:
    grids = list(_broken_grids(run.layout))
    yield from grids
    if not grids:
        yield from _broken_batches(run)
    yield from _broken_sequences(run, moe=facts.experts > 0 if facts else run.layout.ep * run.layout.etp > 1)
    if facts:
        yield from broken(run, facts)


def _broken_grids(layout: Layout) -> Iterator[Broken]:
    world, hosts = layout.world, f"{layout.world} processes ({layout.nodes} nodes x {layout.gpus_per_node})"
    uneven = [key for key in ("tp", "cp", "pp", "ep", "etp") if world % getattr(layout, key)]
    for key in uneven:
        text = f"{getattr(layout, key)} does not divide the {hosts}"
        yield Broken(f"{key} divides", f"layout.{key}", text, divisors(world))
    for axes in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        first, second, third = (getattr(layout, key) for key in axes)
        if world % (first * second * third) and not set(axes) & set(uneven):
            largest = max(axes, key=lambda key: getattr(layout, key))
            product = " * ".join(f"{key} {getattr(layout, key)}" for key in axes)
            text = f"{product} = {first * second * third} does not divide the {hosts}"
            others = {f"layout.{key}": divisors(world)[::-1] for key in axes if key != largest}
            yield Broken(f"grid of {axes}", f"layout.{largest}", text, divisors(world), others)


def _broken_batches(run: Run) -> Iterator[Broken]:
    layout, train = run.layout, run.train
    dp = layout.world // (layout.tp * layout.cp * layout.pp)
    row = train.micro_batch * dp
    if train.batch_ramp and (uneven := [size for size in train.batch_ramp[:2] if size % row]):
        text = f"{uneven[0]} is not a multiple of micro_batch {train.micro_batch} * dp {dp} = {row}"
        yield Broken("batch", "train.ramp_from", text, multiples(uneven[0], row))
    if train.global_batch % row:
        text = f"{train.global_batch} is not a multiple of micro_batch {train.micro_batch} * dp {dp} = {row}"
        yield Broken("batch", "train.global_batch", text, multiples(train.global_batch, row))
    elif layout.vpp and train.global_batch // row % layout.pp:
        # the interleaved schedule works in groups of pp microbatches
        count = train.global_batch // row
        text = f"{train.global_batch} is {count} microbatches, but with vpp it must be a multiple of pp {layout.pp}"
        yield Broken("interleaving", "train.global_batch", text, multiples(train.global_batch, row * layout.pp))


def _broken_sequences(run: Run, moe: bool) -> Iterator[Broken]:
    layout, seq_length = run.layout, run.data.seq_length
    if layout.sp and layout.tp == 1:
        yield Broken("sp", "layout.sp", "true, but it needs tp above 1, and tp is 1", [False])
    if moe and layout.tp > 1 and not layout.sp:
        # core's MoELayer.forward raises
        text = f"false, but experts with tp {layout.tp} need it"
        yield Broken("sp of experts", "layout.sp", text, [True])
    # cp gives each rank a piece from both ends of the sequence, so causal attention costs all ranks the same
    pieces = lcm(2 * layout.cp if layout.cp > 1 else 1, layout.cp * layout.tp if layout.sp else 1)
    if seq_length % pieces:
        cuts = f"cp {layout.cp}, tp {layout.tp}, sp {str(layout.sp).lower()}"
        text = f"{seq_length} is not a multiple of {pieces}: {cuts}"
        yield Broken("sequence", "data.seq_length", text, multiples(seq_length, pieces))
    if layout.vpp and layout.pp == 1:
        yield Broken("vpp", "layout.vpp", f"{layout.vpp} stages per pipeline rank need pp > 1", [None])
    for key in ("first_stage_layers", "last_stage_layers"):
        if layout.pp == 1 and getattr(layout, key):
            yield Broken(key, f"layout.{key}", f"{getattr(layout, key)} needs pp > 1", [None])
