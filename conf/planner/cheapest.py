"""The cheapest hardware on which the whole flow of a run completes: every stage, from the download to the evaluation.

    with_cheapest(plan, run, teacher) -> Plan      the plan with the cheapest offer; `run` is as its file says

All GPUs of conf/tables/gpus.yaml are tried, and the run's own: 1, 2, 4 ... of one host. If none is enough, GPUs with
NVLink are tried on 2, 4 ... hosts, at most those of the run. More GPUs than the fewest that fit are seldom cheaper,
because a host is paid during the download too. The layout is the fastest without cp and vpp that leaves room for the
error of a plan.
LoRA is also tried with frozen matrices in 4 bits that vLLM serves (conf/rules/packed_base.py); they are 10 % from the
released weights. The price is that of all stages in sequence.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

from conf.model_facts import ModelFacts
from conf.planner import parameters
from conf.planner.hardware import GB, GPUS, Gpu
from conf.planner.search import Memo, changes, fastest
from conf.planner.verdict import Offer, Plan, plan
from conf.rules import packed_base, reinforcement, schedule
from conf.rules.contradictions import contradictions
from conf.schema.run import Run

PACKED = {
    "model": {"base": "int4"},
    "convert": {"to": "packed"},
    "export": {"formats": ("adapter",), "quantization": None, "merge_onto": "released"},
    "evaluate": {"adapter": "packed", "quantization": None},
}
ANYWHERE = {"nodes": None, "gpus": None, "expert_parallel": None, "eager": None}  # the layout of vLLM is chosen
NVLINK = 100 * GB  # bytes/s between GPUs that only NVLink reaches


def with_cheapest(planned: Plan, run: Run, teacher: ModelFacts | None = None) -> Plan:
    """Return the plan with the cheapest offer; unchanged on a CPU, and if the number of steps is unknown."""
    if not planned.gpu.cuda or not schedule.last_step(run) or reinforcement.is_asked(run):
        return planned
    here = best = _offer(planned, "") if planned.fits else None
    kinds = [gpu for gpu in (GPUS | {planned.gpu.name: planned.gpu}).values() if gpu.price is not None]
    kinds.sort(key=lambda gpu: -(gpu.price or 0))
    variants = [(tried, Memo()) for tried in _variants(run)]
    for (tried, memo), gpu in product(variants, kinds):
        best = _on(gpu, 1, run, tried, planned, teacher, best, memo)
    if best is here and run.layout.nodes > 1:
        for (tried, memo), gpu in product(variants, [gpu for gpu in kinds if gpu.link > NVLINK]):
            best = _on(gpu, run.layout.nodes, run, tried, planned, teacher, best, memo)
    return replace(planned, cheapest=best)


def _variants(run: Run) -> Iterator[Run]:
    """Yield the run with any layout of vLLM, and with packed weights that vLLM serves."""
    yield run.changed(evaluate=ANYWHERE)
    packed = run.changed(**PACKED | {"evaluate": PACKED["evaluate"] | ANYWHERE})
    if not packed_base.is_served(run) and not [*contradictions(packed)]:
        yield packed


def _on(
    gpu: Gpu,
    hosts: int,
    run: Run,
    tried: Run,
    planned: Plan,
    teacher: ModelFacts | None,
    best: Offer | None,
    memo: Memo,
) -> Offer | None:
    """Return the cheaper one of `best` and the cheapest offer on GPUs of this kind, on one host or on several."""
    if gpu.name != planned.gpu.name:
        tried = tried.changed(hardware={"gpu": gpu.name, "price": None})
    facts, form = planned.facts, packed_base.format_of(tried)
    least = parameters.total(facts) * (form.bytes if form else 4 if run.adapter.kind == "none" else 2)
    download = planned.needs[0].seconds or 0 if planned.needs else 0
    for gpus in _counts(gpu, hosts):
        hourly = gpus * (gpu.price or 0)
        paid = download if hosts == 1 else 0  # only the first of several hosts downloads
        below = (best.cost * 3600 / hourly - paid if best else inf) / (schedule.last_step(run) or 1)
        if below <= 0:
            break
        if least > gpus * gpu.memory:
            continue
        if not (found := fastest(tried, facts, gpu, gpus, below, simple=True, memo=memo)):
            continue
        made = found.applied(tried)
        one = plan(made, facts, gpu, teacher) if not [*contradictions(made)] else None
        if one and one.fits and (offer := _offer(one, changes(run, made))):
            return offer if not best or offer.cost < best.cost else best
    return best


def _counts(gpu: Gpu, hosts: int) -> list[int]:
    """Return the numbers of GPUs to try, powers of 2: on one host, or on 2 to `hosts` hosts."""
    first, last = (1, gpu.per_host) if hosts == 1 else (2 * gpu.per_host, hosts * gpu.per_host)
    return [2**n for n in range(last.bit_length()) if first <= 2**n <= last]


def _offer(planned: Plan, keys: str) -> Offer | None:
    """Return the offer of a plan that fits; None if a stage cannot run, or has no price."""
    costs = [need.cost for need in planned.needs]
    if planned.unserved or planned.unasked or planned.gpu.price is None:
        return None
    return Offer(planned.gpu.name, planned.run.layout.world, sum(cost or 0 for cost in costs), keys)
