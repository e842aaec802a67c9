"""Search for layouts of a run that fit on a number of GPUs, the fastest first, with the reasons against the others.

    search(run, facts, gpu, gpus) -> Found          all layouts
    fastest(run, facts, gpu, gpus) -> Candidate     the fastest with room; layouts that cannot be faster are not tried
    larger(run, facts, gpu, below) -> Candidate     the fastest larger micro batch with room, at the same layout
    changes(before, after) -> str                   the keys in which two runs differ, as overrides of a command line

The search tries all degrees that divide the GPUs, micro batches of 1 to 8 sequences, or of up to 32 short ones, and no,
selective and full recompute, on 16 GPUs at most also of a part of the layers. It sets sp if tp > 1, as sp costs
nothing. A layout that does not fit otherwise is tried with half of the optimizer or all of it on the host, if that is
legal (conf/rules/precision.py) and makes enough room. FP8, the global batch, the model and the trained weights stay the
same. Stages share the layers evenly, or the last one has fewer, as it also computes the loss.

Some layouts are never best and are not tried: tp or etp over the network, cp that leaves a rank less than 1024 tokens,
and more than 4 virtual stages.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf
from typing import Any

from conf.model_facts import ModelFacts
from conf.planner.hardware import GB, Gpu, unsupported
from conf.planner.memory import StageMemory, fullest, lasting
from conf.planner.timing import least, step
from conf.rules import precision
from conf.rules.layout import problems
from conf.schema.run import Layout, Optimizer, Run, Train
from contract.faults import ConfigError

Memo = dict[Any, Any]  # values that the layouts of one search share

TIGHT = 0.1  # difference between plans and measured runs
FEWEST_TOKENS = 1024
MICRO_BATCHES = (1, 2, 4, 8)
SHORT, OF_SHORT = (16, 32), 2**14  # micro batches of short sequences, and most tokens of such a micro batch
PARTS, PARTED = (0.5, 0.75), 16  # of a stage's layers that full recompute can be limited to, and most GPUs for it
VIRTUAL = (None, 2, 4)
OFFLOADS = (0.5, 1.0)


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    train: Train  # with its micro_batch and recompute
    seconds: float  # of a step, likely; infinite if it does not fit
    memory: int  # bytes on the fullest rank
    stage: int  # pipeline rank that is fullest
    over: int  # missing bytes; negative = room
    optimizer: Optimizer  # with its offload

    def applied(self, run: Run) -> Run:
        """Return the run with the layout and all keys of this candidate."""
        return run.model_copy(update={"layout": self.layout, "train": self.train, "optimizer": self.optimizer})

    @property
    def tight(self) -> bool:
        return -self.over < TIGHT * self.memory

    @property
    def verdict(self) -> str:
        if self.over <= 0:
            tight = ", less than the error of a plan" if self.tight else ""
            return f"fits, {-self.over / GB:.1f} GB left{tight}"
        return f"does not fit by {self.over / GB:.1f} GB on stage {self.stage}"


@dataclass(frozen=True)
class Found:
    fitting: list[Candidate]  # the fastest first
    closest: Candidate | None  # of the layouts that do not fit, the one that lacks least
    reasons: Counter[str] = field(default_factory=Counter)  # why the others fail, with their number

    @property
    def offered(self) -> list[Candidate]:
        """The fitting candidates; candidates with more room than the error of a plan come first."""
        return sorted(self.fitting, key=lambda candidate: candidate.tight)

    @property
    def roomy(self) -> bool:
        return any(not candidate.tight for candidate in self.fitting)


def search(run: Run, facts: ModelFacts, gpu: Gpu, gpus: int) -> Found:
    _check(gpu, gpus)
    reasons: Counter[str] = Counter()
    if unable := unsupported(run, gpu):
        return Found([], None, Counter(f"illegal: {line}" for line in unable))
    memo: Memo = {}
    fitting: list[Candidate] = []
    closest: Candidate | None = None
    offloads = _offloads(run, gpu)
    smallest = run.changed(train={**_recompute("full"), "micro_batch": 1})
    for layout in _layouts(run, facts, gpu, gpus, reasons):
        bare = smallest.model_copy(update={"layout": layout})
        if (excess := lasting(_offloaded(bare, offloads[-1]), facts, gpu, memo) - gpu.memory) > 0:
            reasons["does not fit: weights, gradients and optimizer alone are more than a GPU has"] += 1
            if closest is None or excess < closest.over:
                candidate = _candidate(bare, fullest(bare, facts, gpu, memo))
                closest = min(filter(None, (closest, candidate)), key=lambda candidate: candidate.over)
            continue
        lacks: dict[tuple[str, int | None], str] = {}  # by recompute: a larger micro batch lacks no less
        for train in _trains(run, facts, layout, reasons, memo):
            kind = (train.recompute, train.recompute_first)
            if kind in lacks:
                reasons[lacks[kind]] += 1
                continue
            tried, stage = _least(bare.model_copy(update={"train": train}), facts, gpu, offloads, memo)
            candidate = _candidate(tried, stage)
            if candidate.over <= 0:
                fitting.append(replace(candidate, seconds=step(tried, facts, gpu, memo).seconds))
                continue
            lacks[kind] = _lack(candidate)
            reasons[lacks[kind]] += 1
            closest = min(filter(None, (closest, candidate)), key=lambda candidate: candidate.over)
    fitting.sort(key=lambda candidate: (candidate.seconds, candidate.memory))
    return Found(fitting, closest, reasons)


def fastest(
    run: Run,
    facts: ModelFacts,
    gpu: Gpu,
    gpus: int,
    below: float = inf,
    simple: bool = False,
    memo: Memo | None = None,
) -> Candidate | None:
    """Return the fastest layout that leaves room and takes less than `below` seconds a step; None if there is none.

    `simple`: try only layouts without cp and vpp, with the run's micro batch or 1. This takes a tenth of the time.
    `memo` keeps values for the same run on other GPUs.
    """
    _check(gpu, gpus)
    memo = {} if memo is None else memo
    reasons: Counter[str] = Counter()
    offloads, tried = _offloads(run, gpu), list[tuple[float, Run]]()
    for layout in _layouts(run, facts, gpu, gpus, reasons, simple) if not unsupported(run, gpu) else ():
        for train in _trains(run, facts, layout, reasons, memo, simple):
            one = run.model_copy(update={"layout": layout, "train": train})
            if (seconds := least(one, facts, gpu, memo)) < below:
                tried.append((seconds, one))
    best: Candidate | None = None
    smallest = run.changed(train={"micro_batch": 1}, optimizer={"offload": offloads[-1]})
    roomy: dict[Layout, bool] = {}  # whether the GPUs have room for weights, gradients and optimizer
    for seconds, one in sorted(tried, key=lambda pair: pair[0]):
        if seconds >= below:
            break
        if one.layout not in roomy:
            bare = smallest.model_copy(update={"layout": one.layout})
            roomy[one.layout] = lasting(bare, facts, gpu, memo) * (1 + TIGHT) <= gpu.memory
        if not roomy[one.layout]:
            continue
        fitting, stage = _least(one, facts, gpu, offloads, memo)
        found = _candidate(fitting, stage)
        if found.over > 0 or found.tight:
            continue
        takes = step(fitting, facts, gpu, memo).seconds
        if takes < below or (best and takes == below and found.memory < best.memory):
            best, below = replace(found, seconds=takes), takes
    return best


def _check(gpu: Gpu, gpus: int) -> None:
    if gpus < 1 or (gpus > gpu.per_host and gpus % gpu.per_host):
        raise ConfigError(f"gpus: {gpus} is neither up to {gpu.per_host}, one {gpu.name} host, nor a multiple of it")


def _least(run: Run, facts: ModelFacts, gpu: Gpu, offloads: list[float], memo: Memo) -> tuple[Run, StageMemory]:
    """Return the run with the smallest share of the optimizer on the host that makes it fit; unchanged if none does."""
    stage = fullest(run, facts, gpu, memo)
    kept = 1 - run.optimizer.offload
    for share in offloads[1:] if stage.over > 0 else ():
        if stage.over > stage.optimizer * (share - run.optimizer.offload) / kept:
            continue
        tried = _offloaded(run, share)
        if (found := fullest(tried, facts, gpu, memo)).over <= 0:
            return tried, found
    return run, stage


def _offloads(run: Run, gpu: Gpu) -> list[float]:
    """Return the shares of the optimizer to try on the host. The share of the run comes first."""
    own = run.optimizer.offload
    larger = [share for share in OFFLOADS if share > own and not list(precision.contradictions(_offloaded(run, share)))]
    return [own, *(larger if gpu.cuda else [])]


def _offloaded(run: Run, share: float) -> Run:
    return run.changed(optimizer={"offload": share})


def _candidate(run: Run, stage: StageMemory) -> Candidate:
    return Candidate(run.layout, run.train, inf, stage.total, stage.rank, stage.over, run.optimizer)


def _recompute(kind: str, modules: tuple[str, ...] = (), first: int | None = None) -> dict[str, Any]:
    """Return the keys of `train` for this kind of recompute, in blocks of one layer."""
    return {"recompute": kind, "recompute_modules": modules, "recompute_layers": 1, "recompute_first": first}


def _lack(one: Candidate) -> str:
    """Return the reason why a layout does not fit, rounded, so that thousands of layouts have few reasons."""
    lack = "up to 10" if one.over < 10 * GB else "up to 100" if one.over < 100 * GB else "more than 100"
    return f"does not fit by {lack} GB on stage {one.stage}"


def _layouts(
    run: Run, facts: ModelFacts, gpu: Gpu, gpus: int, reasons: Counter[str], simple: bool = False
) -> Iterator[Layout]:
    per_host = min(gpus, gpu.per_host)
    whole = Layout(nodes=gpus // per_host, gpus_per_node=per_host)
    plain = run.changed(train={**_recompute("none"), "micro_batch": 1})
    keys = ("tp", "pp", "ep", "etp") if simple else ("tp", "cp", "pp", "ep", "etp")
    degrees = {"cp": [1]} | {key: list(_degrees(run, facts, gpu, whole, key, reasons)) for key in keys}
    for tp, cp, pp in product(degrees["tp"], degrees["cp"], degrees["pp"]):
        if gpus % (tp * cp * pp):
            continue
        dp = gpus // (tp * cp * pp)
        if run.train.global_batch % dp:
            reasons[f"illegal: train.global_batch {run.train.global_batch} is not a multiple of dp {dp}"] += 1
            continue
        for ep, etp, vpp in product(degrees["ep"], degrees["etp"], VIRTUAL[:1] if simple else VIRTUAL):
            if gpus % (ep * etp * pp) or (vpp and (pp == 1 or _last(facts, pp) or facts.layers // pp % vpp)):
                continue
            if vpp and run.train.global_batch // dp % pp:
                reasons["illegal: with vpp the microbatches are a multiple of pp"] += 1
                continue
            update = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "vpp": vpp, "sp": tp > 1}
            layout = whole.model_copy(update={**update, "last_stage_layers": _last(facts, pp)})
            if broken := problems(plain.model_copy(update={"layout": layout}), facts, suggest=False):
                reasons[f"illegal: {broken[0]}"] += 1
            else:
                yield layout


def _degrees(run: Run, facts: ModelFacts, gpu: Gpu, whole: Layout, key: str, reasons: Counter[str]) -> Iterator[int]:
    """Yield the degrees of one kind that break no rule if all other degrees are 1."""
    for degree in (n for n in range(1, whole.world + 1) if whole.world % n == 0):
        update = {key: degree, "sp": key == "tp" and degree > 1}
        if key == "pp":
            update["last_stage_layers"] = _last(facts, degree)
        layout = whole.model_copy(update=update)
        broken = problems(run.model_copy(update={"layout": layout}), facts, suggest=False)
        rules = [line for line in broken if line.startswith((f"layout.{key}:", "layout.last_stage_layers:"))]
        if rules:
            reasons[f"illegal: {rules[0]}"] += 1
        elif key in ("tp", "etp") and degree > gpu.joined:
            reasons[f"not tried: {key} {degree} leaves the {gpu.joined} GPUs of one NVLink"] += 1
        elif key == "cp" and degree > 1 and run.data.seq_length < degree * FEWEST_TOKENS:
            reasons[f"not tried: cp {degree} leaves a rank less than {FEWEST_TOKENS} tokens"] += 1
        else:
            yield degree


def _last(facts: ModelFacts, pp: int) -> int | None:
    """Return the number of layers of the last stage if stages cannot be equal; None if they can, or if 0 were left."""
    if pp == 1 or facts.layers % pp == 0:
        return None
    last = facts.layers - (pp - 1) * ceil(facts.layers / pp)
    return last if last > 0 else None


def _trains(
    run: Run, facts: ModelFacts, layout: Layout, reasons: Counter[str], memo: Memo, simple: bool = False
) -> Iterator[Train]:
    dp = layout.world // (layout.tp * layout.cp * layout.pp)
    modules = ["layernorm", *(["moe_act"] if run.moe.grouped_gemm else [])] if facts.experts else ["mlp"]
    modules += ["mla_up_proj"] if facts.kv_rank else []
    of_stage = facts.layers // (layout.pp * (layout.vpp or 1))
    firsts = {int(of_stage * part) for part in PARTS} if layout.world <= PARTED and not simple else set[int]()
    some = [_recompute("full", first=first) for first in sorted(firsts) if 0 < first < of_stage]
    choices = (_recompute("none"), _recompute("selective", tuple(modules)), *some, _recompute("full"))
    sizes = sorted({1, run.train.micro_batch}) if simple else _sizes(run)
    for choice, micro_batch in product(choices, sizes):
        microbatches, rest = divmod(run.train.global_batch, micro_batch * dp)
        if rest:
            reasons[f"illegal: train.global_batch {run.train.global_batch} is not a multiple of micro_batch * dp"] += 1
        elif layout.vpp and microbatches % layout.pp:
            reasons["illegal: with vpp the microbatches are a multiple of pp"] += 1
        else:
            # Keys that only some layouts support (conf/rules/contradictions.py) are unset for all others.
            kept = {
                "overlap_tp": run.train.overlap_tp and 1 < layout.tp <= layout.gpus_per_node,
                "cuda_graphs": run.train.cuda_graphs and choice["recompute"] != "full",
            }
            key = ("train", choice["recompute"], choice["recompute_first"], micro_batch, *kept.values())
            if key not in memo:
                memo[key] = run.train.model_copy(update={**choice, **kept, "micro_batch": micro_batch})
            yield memo[key]


def _sizes(run: Run) -> list[int]:
    """Return the micro batches to try."""
    return [*MICRO_BATCHES, *(size for size in SHORT if size * run.data.seq_length <= OF_SHORT)]


def larger(run: Run, facts: ModelFacts, gpu: Gpu, below: float) -> Candidate | None:
    """Return the fastest larger micro batch that leaves room and takes less than `below` seconds a step, if any."""
    memo: Memo = {}
    best: Candidate | None = None
    for size in _sizes(run):
        tried = run.changed(train={"micro_batch": size})
        if size <= run.train.micro_batch or problems(tried, facts, suggest=False):
            continue
        found = _candidate(tried, fullest(tried, facts, gpu, memo))
        if found.over > 0 or found.tight:
            break
        if (seconds := step(tried, facts, gpu, memo).seconds) < below:
            best, below = replace(found, seconds=seconds), seconds
    return best


def changes(before: Run, after: Run) -> str:
    old, new = (run.model_dump(mode="json") for run in (before, after))
    return " ".join(
        f"{section}.{key}={_shown(value)}"
        for section, keys in new.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if value != old[section][key]
    )


def _shown(value: object) -> str:
    """Return a value as YAML without blanks, for a shell."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":")).replace('"', "")
