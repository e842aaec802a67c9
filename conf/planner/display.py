"""Text of a plan for people, and as_dict() of a plan for programs; also for the ranked table of search().

In a stage's bar, each letter is a thirtieth of the GPU: W weights, G gradients, O optimizer, A adapters, F copies of
weights in FP8, a activations, . everything else. A ! stands for missing memory.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from conf.planner import parameters, picture
from conf.planner.goodput import Goodput, goodput
from conf.planner.hardware import GB, Gpu
from conf.planner.memory import StageMemory
from conf.planner.search import Candidate, Found, changes
from conf.planner.serving.layout import Serving
from conf.planner.serving.memory import ServedMemory
from conf.planner.serving.rollout import Rollout
from conf.planner.stage_needs import Asking, Loading, StageNeed, loadings, packing_cost
from conf.planner.timing import HIGH_ON_CPU, LOW_ON_CPU
from conf.planner.verdict import LARGEST, WITH_BASE, WITH_LORA, Plan
from conf.rules import gpus, objectives, schedule
from conf.schema.run import Layout, Run
from contract.amounts import dollars, size

BAR = 30  # characters for all of a GPU's memory
# Parts of a stage's memory with a letter in the bar. All others (BESIDES) are drawn as dots.
DRAWN = {"weights": "W", "gradients": "G", "optimizer": "O", "adapters": "A", "copies": "F", "activations": "a"}
BESIDES = ("logits", "dispatch", "working", "buffers", "context", "margin")
SUGGESTED = 3
MUCH, FEW = 10**12, 2  # bytes of checkpoints that cause a warning, and the number that is enough to resume
COLUMNS = ("hosts", "GPUs", "GB a GPU", "GB a host", "GB disk", "time", "USD")  # of the table of stages
WITHOUT = "evaluate.tasks=[] trains and exports it without evaluation, and promotes nothing"


def lines(plan: Plan) -> Iterator[str]:
    run, gpu, layout = plan.run, plan.gpu, plan.run.layout
    yield f"{run.name}: {run.model.source} on {layout.world} {gpu.name} ({gpu.memory / GB:.1f} GB each)"
    count, active = (n / 1e9 for n in (parameters.total(plan.facts), parameters.active(plan.facts)))
    trained = "all of them trained" if run.adapter.kind == "none" else f"{run.adapter.kind} of rank {run.adapter.rank}"
    yield f"model    {count:.4g}B parameters, {active:.3g}B per token, {trained}"
    yield f"layout   {layout.nodes} nodes x {layout.gpus_per_node}: {degrees(layout)}; {_batches(run)}"
    yield from (f"illegal  {line}" for line in plan.problems)
    if plan.cut:
        dense = f"tp {layout.tp} * cp {layout.cp} * pp {layout.pp} * dp {plan.cut.dp}"
        experts = f"etp {layout.etp} * ep {layout.ep} * pp {layout.pp} * edp {plan.cut.edp}"
        yield f"grids    {dense} = {experts} = {layout.world}; microbatches per step {plan.cut.microbatches}"
        yield ""
        yield from _memory_table(plan)
        yield ""
        yield from picture.lines(plan)
        yield ""
        yield from _time_lines(plan)
        yield ""
        yield from stage_table(plan, plan.needs)
        yield from base(plan)
        yield ""
    yield from evaluation(plan)
    yield from answers(plan)
    yield from reference(plan)
    if best := plan.cheapest:
        how = f"{best.gpus} {best.gpu}: {best.keys}" if best.keys else f"this, {best.gpus} {best.gpu}"
        yield f"cheapest {dollars(best.cost)} USD for all stages: {how}"
    for keys, found in plan.instead.items():
        yield f"with {keys}:" if keys else ""
        yield from suggestions(found, layout.world, gpu)
    if plan.not_searched:
        yield f"instead  no layout was searched: {plan.not_searched}"
    yield plan.verdict
    evaluation_refused = plan.unserved and f"evaluation: {plan.unserved}; {WITHOUT}"
    for reason in (evaluation_refused, plan.unanswered and f"reinforce: {plan.unanswered}", plan.unasked):
        if reason:
            yield f"also refused: {reason}"


def degrees(layout: Layout) -> str:
    always = [f"{key} {getattr(layout, key)}" for key in ("tp", "pp", "ep", "etp")]
    others = {
        "cp": layout.cp > 1 and layout.cp,
        "vpp": layout.vpp,
        "first": layout.first_stage_layers,
        "last": layout.last_stage_layers,
    }
    return " ".join(always + [f"{key} {value}" for key, value in others.items() if value] + ["sp"] * layout.sp)


def _batches(run: Run) -> str:
    train = run.train
    batch = f"batch {train.global_batch} of {run.data.seq_length} tokens, micro {train.micro_batch}"
    low = f", fp8 {train.fp8}{' weights too' if train.fp8_weights else ''}" if train.fp8 else ""
    kept = {"means in": run.optimizer.states, "gradients in": run.optimizer.gradients}
    states = "".join(f", {what} {dtype}" for what, dtype in kept.items() if dtype != "fp32")
    away = f", {run.optimizer.offload:.0%} of the optimizer on the host" if run.optimizer.offload else ""
    return f"{batch}, recompute {train.recompute}{low}{states}{away}"


def _memory_table(plan: Plan) -> Iterator[str]:
    """Yield a table of the GB on the fullest rank of every stage, with a bar of BAR characters."""
    drawn = [name for name in DRAWN if name != "copies" or plan.fullest.copies]
    columns = [*drawn, "besides", "total"]
    yield f"stage  {'GPUs':>9}  layers  " + "  ".join(f"{name:>{max(7, len(name))}}" for name in columns)
    for stage, place in zip(plan.stages, picture.stages(plan), strict=True):
        items = stage.items
        figures = [items[name] for name in drawn] + [sum(items[name] for name in BESIDES), stage.total]
        cells = (f"{n / GB:>{max(7, len(name))}.1f}" for n, name in zip(figures, columns, strict=True))
        mark = "  <- fullest" if stage is plan.fullest else ""
        ranks, count = picture.span(*place["gpus"]), sum(place["kinds"].values())
        yield f"{stage.rank:>5}  {ranks:>9}  {count:>6}  {'  '.join(cells)}  |{_bar(stage)}|{mark}"
    yield "GB on the fullest GPU of a stage; besides: logits, experts' tokens, one layer's work, buffers, CUDA, margin"


def _bar(stage: StageMemory) -> str:
    """Return the bar of a stage. A ! stands for missing memory.

    Each part ends at the rounded sum of all parts so far, so rounding one part does not shift the others.
    """
    text, end = "", 0
    for name, letter in (*DRAWN.items(), ("", ".")):
        end += stage.items[name] if name else sum(stage.items[item] for item in BESIDES)
        text += letter * (min(BAR, round(end / stage.capacity * BAR)) - len(text))
    return text.ljust(BAR) if stage.total <= stage.capacity else f"{text}!"


def _time_lines(plan: Plan) -> Iterator[str]:
    time = plan.time
    if time is None:
        yield f"step     {cpu_step(plan)}, from matrix products measured on this CPU"
        yield f"run      {length(plan)}"
        return
    rate = f"{time.tokens_per_second:.0f} tokens/s/GPU with padding, {time.tflops:.0f} TFLOP/s/GPU"
    yield f"step     {time.likely:.3g} s likely, {time.low:.3g} to {time.high:.3g}; {rate}"
    waits = ", ".join(f"{dim} {seconds:.2g} s" for dim, (_, seconds) in time.communication.items() if seconds)
    if better := plan.unpacked:
        keys = f"train.micro_batch={better.train.micro_batch}, which takes {better.seconds:.3g} s a step, packed or not"
        yield f"packing  slower than unpacked rows with {keys}"
    yield f"waits    {waits or 'for no other GPU'}; {time.bubble:.0%} of a step for the pipeline"
    cost = "" if time.cost is None else f" at {plan.gpu.price:g} per GPU and hour"
    yield f"run      {length(plan)}{cost}"
    if found := _goodput(plan):
        yield f"time     {_time_text(plan, found)}"
    if plan.compared:
        yield f"faster   {_faster(plan, time.likely)}"
    elif plan.fits and plan.run.world > LARGEST:
        yield f"faster   not searched beyond {LARGEST} GPUs; --gpus {plan.run.world} does"


def _goodput(plan: Plan) -> Goodput | None:
    return goodput(plan.run, plan.facts, plan.time, plan.steps) if plan.time and plan.steps else None


def _time_text(plan: Plan, found: Goodput) -> str:
    parts = [f"{name} {seconds / found.whole:.1%}" for name, seconds in found.seconds.items() if name != "training"]
    failures = f"{found.failures:.2g} failures at one in {plan.run.hardware.mtbf:,.0f} GPU-hours (hardware.mtbf)"
    price, gpu_hours = plan.gpu.price, found.whole / 3600 * plan.run.layout.world
    cost = "" if price is None else f", {dollars(gpu_hours * price)} USD"
    return f"{found.effective:.1%} effective of {duration(found.whole)}{cost}: {', '.join(parts)}; {failures}"


def length(plan: Plan) -> str:
    """Return steps, hours and price of the training, and assumptions about its data."""
    time, epochs = plan.time, plan.run.train.epochs
    of = "" if epochs is None else f"{epochs:g} epoch{'s' * (epochs != 1)}"
    if plan.steps is None:
        return f"{of} of sequences {plan.assumed}"
    steps = f"{plan.steps} steps{f' = {of} of {plan.assumed}' if of else ''}"
    hours = "" if time is None or time.hours is None else f", {time.hours:.3g} hours"
    hours = f", about {duration(plan.cpu_step * plan.steps)}" if plan.cpu_step else hours
    return f"{steps}{hours}{'' if time is None or time.cost is None else f', {dollars(time.cost)} USD'}"


def cpu_step(plan: Plan) -> str:
    """Return the time of a step on this host's CPU as text."""
    assert plan.cpu_step
    low, high = plan.cpu_step * LOW_ON_CPU, plan.cpu_step * HIGH_ON_CPU
    return f"about {plan.cpu_step:.2g} s a step ({low:.2g} to {high:.2g})"


def _faster(plan: Plan, seconds: float) -> str:
    best = plan.faster
    if best is None:
        return f"no layout of {plan.run.world} {plan.gpu.name} that leaves room was found"
    keys = changes(plan.run, best.applied(plan.run))
    return f"{seconds / best.seconds:.2f} times, {best.seconds:.3g} s a step, {-best.over / GB:.1f} GB left: {keys}"


def stage_table(plan: Plan, needs: Sequence[StageNeed]) -> Iterator[str]:
    """Yield a table of the needs of these stages of the flow."""
    rows = [("stage", *COLUMNS), *((need.stage, *cells(need)) for need in needs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for name, *figures in rows:
        aligned = (figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True))
        yield f"{name.ljust(widths[0])}  {'  '.join(aligned)}".rstrip()
    yield f"all of them: {whole(plan, needs)}"
    if plan.noise and any(need.stage.startswith("evaluate") for need in needs):
        yield plan.noise
    train = next((need for need in needs if need.stage == "train"), None)
    if train and train.disk > MUCH and plan.run.checkpoint.keep is None:
        count = schedule.saved(plan.run)
        if count > FEW + 1:
            few = train.disk / count * (FEW + 1)  # a new one is complete before the oldest is removed
            yield (
                f"warning: checkpoint.keep is null: all {count} checkpoints are kept, {size(train.disk)}; "
                f"checkpoint.keep={FEW} takes {size(few)}"
            )


def base(plan: Plan) -> Iterator[str]:
    """Yield lines about the values of convert.to: the costs of each, and which of the first two costs less."""
    if not plan.gpu.cuda:
        return
    ways = loadings(plan.run, plan.facts)
    for way in ways:
        named = "base    " if way is ways[0] else "        "
        costs = f"{duration(way.once)} once, {duration(way.start)} a start, {way.disk / GB:,.1f} GB of disk"
        taken = "  <- configured" if way.to == plan.run.convert.to else ""
        yield f"{named} convert.to={way.to}: {costs}, {way.read / GB:,.1f} GB read until the first step{taken}"
    yield f"         {cheaper(ways[0], ways[1])}"
    if seconds := packing_cost(plan.run, plan.facts):
        text = "reads the unpacked base before the first step, to report what packing costs"
        yield f"         log.packing_cost: {duration(seconds)} once: {text}"


def cheaper(converted: Loading, direct: Loading) -> str:
    """Return which of the two costs less, and why."""
    disk = f"{(converted.disk - direct.disk) / GB:,.1f} GB"
    saved, longer = converted.once - direct.once, direct.start - converted.start
    if longer <= 0:
        return f"none costs less: {disk} and {duration(saved)} less, and each start takes no longer"
    if saved <= 0:
        return f"torch_dist costs less time: it is ready {duration(-saved)} sooner; none takes {disk} less"
    starts = math.ceil(saved / longer)
    return (
        f"none costs less up to {starts} starts, of this run and of others on the same base, with {disk} less on disk; "
        f"each start takes {duration(longer)} longer, so from then on torch_dist does"
    )


def cells(need: StageNeed) -> tuple[str, ...]:
    """Return a stage's figures for COLUMNS. A figure that is unknown, or that the stage does not use, is empty."""
    gigabytes = [f"{n / GB:.1f}" if n else "" for n in (need.gpu_memory, need.memory, need.disk)]
    cost = "" if need.cost is None else dollars(need.cost)
    time = "" if need.seconds is None else duration(need.seconds)
    return str(need.hosts), str(need.gpus or ""), *gigabytes, time, cost


def whole(plan: Plan, needs: Sequence[StageNeed]) -> str:
    """Return the disk, time and price of all these stages together."""
    totals = [f"{sum(need.disk for need in needs) / GB:,.0f} GB of disk"]
    if plan.gpu.cuda:
        without = any(need.stage == "train" and need.seconds is None for need in needs)
        seconds = duration(sum(need.seconds or 0 for need in needs))
        totals.append(f"{seconds} in sequence{' without train' if without else ''}")
    if plan.gpu.price is not None:
        totals.append(f"{dollars(sum(need.cost or 0 for need in needs))} USD")
    return ", ".join(totals)


def duration(seconds: float) -> str:
    if seconds < 6000:
        return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86400:.0f} days"


def evaluation(plan: Plan) -> Iterator[str]:
    """Yield lines about how vLLM serves the model, and when the base is evaluated."""
    if served := plan.serving:
        way, room = served.way, served.memory
        spread = " with whole experts" * way.expert_parallel + " and a separate adapter" * (way.adapter is not None)
        graphs = "eager" if way.eager else "compiled"
        kind = plan.run.model.base if way.codes else "fp8" if way.quantized else {2: "bf16", 4: "fp32"}[way.byte]
        parts = _parts(room, max(0, room.cache), room.taken)
        yield f"serving  {way.hosts} x {way.tp} {plan.gpu.name} in {kind}{spread}, {graphs}: each {_amounts(parts)}"
        if served.lacks <= 0:
            tokens = f"{room.cached:,} tokens, {served.at_once} rows of {served.row} at once"
            yield f"cache    {tokens}; {way.tokens} tokens a step"
            order = "during" if gpus.beside(plan.run, plan.gpu.per_host) else "before"
            turns = f"turns    evaluate-base {order} train, on hosts of {plan.gpu.per_host} GPUs"
            where = f"; without GPUs there, gang.engine {plan.run.gang.engine} starts evaluations on other hosts"
            yield turns + where * gpus.may_leave(plan.run)


def answers(plan: Plan) -> Iterator[str]:
    """Yield lines about vLLM next to reinforcement learning."""
    rollout = plan.rollout
    if rollout is None or not plan.gpu.cuda:
        return
    parts = _parts(rollout.memory, rollout.cache, rollout.taken) | {"training": rollout.beside}
    where = _of_vllm(rollout, plan.gpu.name)
    yield f"answers  vLLM on {where}: {_amounts(parts)}; {rollout.at_once} rows of {rollout.row} at once"
    if not rollout.alone:
        yield f"turns    {rollout.awake / GB:.1f} GB while vLLM answers, {rollout.trains / GB:.1f} GB while it sleeps"
    if phases := rollout.seconds:
        each = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in phases.phases.items())
        overlap = ", generate during train" if phases.beside else ""
        yield f"phases   {phases.step:.3g} s a step of reinforce: {each}{overlap}"


def _of_vllm(rollout: Rollout, gpu: str) -> str:
    """Return the GPUs of vLLM as text. The content of each GPU follows it."""
    if not rollout.alone:
        count = rollout.engines * rollout.way.tp
        return f"the first {count} {gpu}, each" if count > 1 else f"the first {gpu}"
    if rollout.way.tp > 1:
        engines = f"{rollout.engines} engines, each" if rollout.engines > 1 else "one engine"
        return f"{rollout.gpus} separate {gpu}, {engines} on {rollout.way.tp} GPUs, each GPU"
    return f"{rollout.engines} separate {gpu}, each" if rollout.engines > 1 else f"one separate {gpu}"


def reference(plan: Plan) -> Iterator[str]:
    """Yield lines about the teacher of a distillation, which scores the rows at the layout of training."""
    teacher = plan.asking
    if teacher is None or not objectives.has_teacher(plan.run):
        return
    count, stage = parameters.total(teacher.facts) / 1e9, teacher.fullest
    rows = "all rows" if teacher.rows is None else f"about {teacher.rows:,} rows"
    yield f"teacher  {plan.run.train.teacher}: {count:.4g}B parameters, scores {rows} at the layout of training"
    besides = stage.total - stage.weights
    parts = f"{stage.weights / GB:.1f} GB weights, {besides / GB:.1f} GB besides"
    yield f"         {parts}, of {stage.capacity / GB:.1f} on {plan.gpu.name}, stage {stage.rank}"


def _parts(memory: ServedMemory, cache: int, taken: int) -> dict[str, int]:
    found = {"weights": memory.weights, "adapters": memory.adapters, "cache": cache}
    return found | {"besides": taken - sum(found.values())}


def _amounts(parts: dict[str, int]) -> str:
    return ", ".join(f"{size / GB:.1f} GB {name}" for name, size in parts.items() if size)


def suggestions(found: Found, gpus: int, gpu: Gpu) -> Iterator[str]:
    if found.fitting:
        room = " with room" if found.roomy else ""
        yield f"instead  {len(found.fitting)} layouts of {gpus} {gpu.name} are legal and fit; the fastest{room}:"
        yield from (f"  {row}" for row in ranking(found.offered[:SUGGESTED], gpu))
        return
    yield f"instead  no layout of {gpus} {gpu.name} is legal and fits"
    if found.closest:
        closest = found.closest
        yield f"closest  {degrees(closest.layout)}; recompute {closest.train.recompute}; {closest.verdict}"


def ranking(candidates: list[Candidate], gpu: Gpu) -> Iterator[str]:
    for place, candidate in enumerate(candidates, 1):
        choice = f"micro {candidate.train.micro_batch} recompute {candidate.train.recompute}"
        choice += f" offload {candidate.optimizer.offload:g}" if candidate.optimizer.offload else ""
        figures = f"{candidate.seconds:8.3g} s  " if gpu.cuda else ""
        figures += f"{candidate.memory / GB:6.1f} GB"
        cost = _cost(candidate, gpu)
        figures += "" if cost is None else f"  {dollars(cost)} USD"
        yield f"{place:>3}. {figures}  {degrees(candidate.layout)}; {choice}; {candidate.verdict}"


def _cost(one: Candidate, gpu: Gpu) -> float | None:
    """Return the price of all steps in USD; None if the price of the GPU or the number of steps is unknown."""
    if gpu.price is None or one.train.steps is None:
        return None
    return one.seconds * one.train.steps / 3600 * one.layout.world * gpu.price


PLAIN = ("legal", "fits", "verdict", "cpu_step", "noise", "unserved", "unanswered", "unasked")  # fields of a plan


def as_dict(plan: Plan) -> dict[str, Any]:
    time, gpu = plan.time, plan.gpu
    searched = {keys: found_dict(found, found.offered[:SUGGESTED], gpu) for keys, found in plan.instead.items()}
    packed = [(keys, one) for keys, one in searched.items() if keys.startswith(WITH_BASE)]
    return {
        "name": plan.run.name,
        "model": str(plan.run.model.source),
        "parameters": parameters.total(plan.facts),
        "active_parameters": parameters.active(plan.facts),
        "gpu": gpu.name,
        "gpu_memory": gpu.memory,
        "gpus": plan.run.layout.world,
        "layout": plan.run.layout.model_dump(mode="json"),
        **{key: getattr(plan, key) for key in PLAIN},
        "problems": list(plan.problems),
        "grid": vars(plan.cut) if plan.cut else None,
        "fullest": plan.fullest.rank if plan.stages else None,
        "stages": [_stage_dict(stage) for stage in plan.stages],
        "picture": picture.as_dict(plan),
        "time": dict(vars(time)) if time else None,
        "goodput": vars(found) | {"effective": found.effective} if (found := _goodput(plan)) else None,
        "unpacked": plan.unpacked and _candidate_dict(plan.unpacked, gpu),
        "faster": plan.faster and _candidate_dict(plan.faster, gpu),
        "cheapest": plan.cheapest and dict(vars(plan.cheapest)),
        "stage_needs": [dict(vars(need)) for need in plan.needs],
        "base": [dict(vars(way)) for way in loadings(plan.run, plan.facts)] if gpu.cuda else None,
        "evaluation": plan.serving and _evaluation_dict(plan.serving),
        "reinforce": plan.rollout and _rollout_dict(plan.rollout),
        "reference": plan.asking and _asking_dict(plan.run, plan.asking),
        "instead": searched.get(""),
        "instead_with_lora": searched.get(WITH_LORA),
        "instead_with_packed": next(({"base": keys[len(WITH_BASE) :]} | one for keys, one in packed), None),
    }


def _stage_dict(stage: StageMemory) -> dict[str, int]:
    return {"rank": stage.rank, **stage.items, "total": stage.total, "over": stage.over}


def _evaluation_dict(one: Serving) -> dict[str, Any]:
    way = {"nodes": one.way.hosts, "gpus": one.way.tp, "expert_parallel": one.way.expert_parallel}
    way |= {"quantized": one.way.quantized, "eager": one.way.eager, "tokens_of_a_step": one.way.tokens}
    room = {key: value for key, value in vars(one.memory).items() if key != "capacity"}
    rows = {"row": one.row, "rows_at_once": one.at_once, "cached": one.memory.cached, "over": one.lacks}
    return {**way, **room, "cache": one.memory.cache, "total": one.memory.taken, **rows}


def _rollout_dict(one: Rollout) -> dict[str, Any]:
    sizes = {"weights": one.memory.weights, "cache": one.cache, "vllm": one.taken, "training": one.beside}
    sizes |= {"awake": one.awake, "asleep": one.trains, "row": one.row, "rows_at_once": one.at_once}
    sizes |= {"engines": one.engines, "gpus": one.gpus}
    return {**sizes, "seconds": one.seconds.phases | {"step": one.seconds.step} if one.seconds else None}


def _asking_dict(run: Run, one: Asking) -> dict[str, Any]:
    stages = [_stage_dict(stage) for stage in one.stages]
    of = run.train.teacher if objectives.has_teacher(run) else str(run.model.source)
    return {"model": of, "parameters": parameters.total(one.facts), "rows": one.rows, "stages": stages}


def found_dict(found: Found, shown: list[Candidate], gpu: Gpu) -> dict[str, Any]:
    return {
        "fitting": len(found.fitting),
        "layouts": [_candidate_dict(one, gpu) for one in shown],
        "closest": found.closest and _candidate_dict(found.closest, gpu),
        "reasons": dict(found.reasons.most_common()),
    }


def _candidate_dict(one: Candidate, gpu: Gpu) -> dict[str, Any]:
    return {
        "layout": one.layout.model_dump(mode="json"),
        "micro_batch": one.train.micro_batch,
        "recompute": one.train.recompute,
        "recompute_modules": list(one.train.recompute_modules),
        "offload": one.optimizer.offload,
        "seconds": one.seconds if one.over <= 0 and gpu.cuda else None,
        "cost": _cost(one, gpu) if one.over <= 0 else None,
        "memory": one.memory,
        "over": one.over,
        "verdict": one.verdict,
    }
