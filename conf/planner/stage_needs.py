"""Needs of every stage of a run: hosts, GPUs and their memory, memory of a host, disk, time and price.

    stage_needs(run, facts, gpu, stages, time, serving, rollout) -> [StageNeed, ...]       in the order of the flow

`stages` and `time` are figures of the training, `serving` is the layout of the evaluation, `rollout` is vLLM next to
reinforcement learning (conf/planner/serving/), `asking` is the reference model. Training, its reference, and a
conversion or an evaluation on several hosts may run on other hosts. All other stages run on the flow's host, which has
layout.gpus_per_node GPUs. Its GPUs are paid whether a stage uses them or not, so they count in each price; other hosts
count while they are used.

START and the rates of conversion and export were measured on one H200 with 9.6 GB of weights and one process (November
2026: 63 s and 98 s). DOWNLOAD was measured there too, from a folder of that host (12 s). Disk and memory are computed,
and so is the rate of several processes, which is at most READ, the rate of the host's storage. CHECKED and UNPACKED are
for a base without conversion (convert.to: none): rates of one core, measured on 256 MB of bf16 and on a matrix of
DeepSeek-V3 in FP8 blocks. DESCRIBED is about the time for the 45,000 tensors of GLM-4.7. A packed base is checked and
then packed, by a process on each core. PACKED was measured on a core of a host without GPUs, with matrices of 1408 x
4096 in bf16, including the loss of each (docs/measurements/quantised.md).

Not covered: preparation, as its rows are not counted yet; copies to a store other than a folder; checkpoints' time.
"""

from dataclasses import dataclass, replace

from conf.model_facts import ModelFacts
from conf.planner import memory, parameters, states
from conf.planner.hardware import GB, GIB, Gpu
from conf.planner.memory import PROCESS, StageMemory
from conf.planner.serving.duration import READ, duration
from conf.planner.serving.layout import Serving
from conf.planner.serving.rollout import BEGINNING, Rollout, held
from conf.planner.timing import Timing
from conf.planner.timing import asking as seconds_of_asking
from conf.rules import objectives, packed_base, pretraining, reinforcement, schedule, shipping
from conf.rules.gpus import takes
from conf.rules.layout import grid
from conf.rules.serving import BYTES, precision
from conf.schema.run import Run
from conf.schema.sections import Layout

START = 20.0  # seconds until a command of the trainer has imported its packages and connected its processes
DOWNLOAD, CONVERT, EXPORT = 0.8 * GB, 0.22 * GB, 0.11 * GB  # bytes/s; the last two per process
CHECKED = 1.2 * GB  # bytes/s of a core that computes checksums of released tensors
UNPACKED = 0.15 * GB  # bytes/s of a rank that unpacks codes and scales
# bytes/s of bf16 weights that a core packs into codes and scales, by model.base
PACKED = {"fp8": 0.23 * GB, "int4": 0.36 * GB, "nvfp4": 0.17 * GB, "mxfp4": 0.20 * GB}
CORES = 14  # of a process on a GPU host: a DGX H100 has 112 for 8 GPUs
DESCRIBED = 20.0  # seconds in which a rank finds the released tensors of its weights
CONVERTING = 3 * GB  # bytes of a process at most: its libraries and a shard of tensors
PACKING = 1 * GB  # bytes of each process that packs, at most: codes and scales of a file
FILE = 5 * GB  # bytes of a file of a release: one is read and one is written at a time
RANK = int(1.9 * GB)  # resident memory of a training process on a GPU: 1.84 to 1.91 GB on an H100, with private pages
OF_VLLM = 4 * GIB  # resident memory of a process of vLLM, without files that it maps


@dataclass(frozen=True)
class StageNeed:
    stage: str
    hosts: int
    gpus: int  # of each host
    gpu_memory: int  # bytes on the fullest GPU
    memory: int  # bytes of a host
    disk: int  # bytes that stay on storage of all hosts
    seconds: float | None = None  # None: unknown, or the hosts have no GPUs
    cost: float | None = None  # USD


@dataclass(frozen=True)
class Asking:
    """The reference model of a training, if the layout of training is legal for it."""

    run: Run  # of the reference model
    facts: ModelFacts
    stages: tuple[StageMemory, ...]  # while it scores rows
    rows: int | None  # rows that it scores; None if unknown

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)


def stage_needs(
    run: Run,
    facts: ModelFacts,
    gpu: Gpu,
    stages: tuple[StageMemory, ...],
    time: Timing | None,
    serving: Serving | None,
    rollout: Rollout | None = None,
    asking: Asking | None = None,
) -> list[StageNeed]:
    count = parameters.total(facts)
    released = _released(facts)
    needs = [*_model(run, facts), StageNeed("prepare", 1, 0, 0, GIB, 0)]
    needs += [_writing("pack", run, converted(run, facts))] if packed_base.is_served(run) and run.evaluate.tasks else []
    evaluations = [_evaluation(run, facts, gpu, serving)] if run.evaluate.tasks else []
    needs += [replace(need, stage="evaluate-base") for need in evaluations if not pretraining.is_drawn(run)]
    if asking and objectives.has_teacher(run):
        needs += [replace(need, stage=f"{need.stage}-teacher") for need in _model(asking.run, asking.facts)]
    needs += [_asked(asking, gpu)] if asking else []
    merged = _merged(run, facts, released, count)
    needs.append(_training(run, facts, stages, time, gpu))
    needs += [_reinforcement(run, facts, stages, gpu, rollout)] if rollout else []
    needs.append(_export(run, facts, merged))
    needs += [replace(need, stage="evaluate-tuned") for need in evaluations]
    if not gpu.cuda:  # no time is predicted on a CPU
        return [replace(need, gpus=0, gpu_memory=0, seconds=None) for need in needs]
    return [replace(need, cost=_cost(run, gpu, need)) for need in needs]


def _merged(run: Run, facts: ModelFacts, released: int, count: int) -> int:
    """Return the bytes of the merged model, and of a GGUF file."""
    if not shipping.is_rounded(run):
        file = int(count * shipping.GGUF_BYTES[run.export.gguf]) if run.export.gguf else 0
        return file + (released if run.export.quantization else count * 2)
    kept = facts.vocab * facts.hidden * (1 if facts.tied else 2)
    return int(kept * 2 + (count - kept) * packed_base.FORMATS[run.export.quantization or ""].bytes)


def _model(run: Run, facts: ModelFacts) -> list[StageNeed]:
    """Return the needs of the download and the conversion of a model."""
    released = _released(facts)
    return [StageNeed("download", 1, 0, 0, GIB, released, released / DOWNLOAD), _conversion(run, facts)]


def _asked(asking: Asking, gpu: Gpu) -> StageNeed:
    """Return the needs of the reference stage. The disk of distillation is an upper limit: as if all tokens counted."""
    run, layout, rows = asking.run, asking.run.layout, asking.rows
    teaches = objectives.has_teacher(run)
    disk = (rows or 0) * 8 * (run.train.teacher_top_k * run.data.seq_length if teaches else 1)
    seconds = None
    if rows is not None:
        seconds = START + load(run, asking.facts) + seconds_of_asking(run, asking.facts, gpu, rows)
    resident = 0 if gpu.cuda else _fullest_host(run, [one.total for one in asking.stages])
    hosts, fullest = takes(run, "reference").hosts, asking.fullest.total
    return StageNeed("reference", hosts, layout.gpus_per_node, fullest, resident, disk, seconds)


def _released(facts: ModelFacts) -> int:
    """Return the bytes of the release as published: in bf16, or quantised except for norms, vocabulary and routers."""
    count, packed = parameters.total(facts), 0
    for kind in [*facts.kinds, *[facts.base("mtp")] * facts.mtp_layers] if facts.packed else []:
        packed += parameters.parts(facts, kind)["experts"]
        if not facts.packed_experts:
            packed += sum(one.into * one.out for one in parameters.linears(facts, kind))
    return int(2 * (count - packed) + facts.packed * packed)


def on_one_host(run: Run) -> Run:
    """Return the run in a few processes of one host, which share the files of a model that needs several hosts.

    A run of one host stays as it is.
    """
    if run.layout.nodes == 1:
        return run
    count = next(n for n in (4, 2, 1) if run.layout.ep % n == 0 and run.train.global_batch % n == 0)
    return run.changed(layout=dict(Layout(gpus_per_node=count, ep=count)), train={"micro_batch": 1})


def converted(run: Run, facts: ModelFacts) -> int:
    """Return the bytes of the base that training reads."""
    form = packed_base.format_of(run)
    if run.convert.to == "packed" and form:
        (held,) = memory.holdings(run.model_copy(update={"layout": Layout()}), facts, {})
        return states.packed_bytes(run, form, held.parameters, held.quantized, held.matrices)
    return parameters.total(facts) * states.byte(run.train) if run.convert.to == "torch_dist" else 0


def _conversion(run: Run, facts: ModelFacts) -> StageNeed:
    """Return the needs of a conversion, on the flow's host or the hosts of training. A process holds one shard."""
    share, written, released = takes(run, "convert"), converted(run, facts), _released(facts)
    gpus, hosts = share.gpus or 0, share.hosts
    here = on_one_host(run) if run.layout.nodes > hosts else run
    resident = CONVERTING * here.layout.gpus_per_node
    if run.convert.to == "torch_dist":
        rate = min(CONVERT * here.world, READ * hosts / 2)  # it reads and writes
        return StageNeed("convert", hosts, gpus, 0, resident, written, START + written / rate)
    cores = CORES * here.world
    seconds = START + released / min(CHECKED * cores, READ * hosts)
    if run.convert.to == "packed":
        resident += PACKING * CORES * here.layout.gpus_per_node
        base = parameters.total(facts) * states.byte(run.train)
        packed = base / (PACKED[run.model.base] * cores) + (base / (UNPACKED * here.world) if facts.packed else 0.0)
        seconds += max(packed, (released + written) / (READ * hosts))
    return StageNeed("convert", hosts, gpus, 0, resident, written, seconds)


@dataclass(frozen=True)
class Loading:
    """A value of convert.to: how training gets the weights of the release, and the costs."""

    to: str  # the value of convert.to
    once: float  # seconds until the base is ready
    start: float  # seconds of each start of a training, until its ranks hold the weights
    disk: int  # bytes that the base takes
    read: int  # bytes that are read until the end of the first start


def loadings(run: Run, facts: ModelFacts) -> list[Loading]:
    """Return the values of convert.to: a converted base, none and, if model.base is packed, a packed base."""
    released, found = _released(facts), []
    for to in ("torch_dist", "none", *(["packed"] if packed_base.format_of(run) else [])):
        one = run.changed(convert={"to": to})
        need = _conversion(one, facts)
        assert need.seconds is not None
        loaded = released if to == "none" else need.disk
        again = released if to == "packed" else 0  # to compute its checksums and to pack it
        found.append(Loading(to, need.seconds, load(one, facts), need.disk, released + again + loaded))
    return found


def load(run: Run, facts: ModelFacts) -> float:
    """Return the seconds in which the start of a training loads the base."""
    base = parameters.total(facts) * states.byte(run.train)
    if run.convert.to != "none":
        return converted(run, facts) / READ
    unpacked = base / (UNPACKED * run.world) if facts.packed else 0.0  # each rank unpacks its own part
    return DESCRIBED + max(_released(facts) / READ, unpacked)


def packing_cost(run: Run, facts: ModelFacts) -> float:
    """Return the seconds in which a training reads the unpacked base, to compare it with the packed one; 0: never."""
    if not packed_base.measures_cost(run, bool(facts.packed)):
        return 0.0
    way = "torch_dist" if run.convert.to == "torch_dist" else "none"
    described = DESCRIBED if way == "none" else 0.0
    read = load(run.changed(convert={"to": way}), facts) - described
    return described + packed_base.measured_batches(run) * read


def checkpoint_bytes(run: Run, facts: ModelFacts) -> int:
    trained, byte = _trained(run, facts), states.byte(run.train)
    kept = (8 if byte == 4 else 12) * trained if run.checkpoint.save_optimizer else 0  # always in fp32
    return trained * byte + kept


def _training(run: Run, facts: ModelFacts, stages: tuple[StageMemory, ...], time: Timing | None, gpu: Gpu) -> StageNeed:
    written = schedule.saved(run)
    # a new checkpoint is complete before the oldest is removed
    copies = min(written, run.checkpoint.keep + 1) if run.checkpoint.keep else written
    layout = run.layout
    hours = time.hours if time else None
    began = START + load(run, facts) + packing_cost(run, facts)
    seconds = None if hours is None else hours * 3600 + began
    fullest, resident = max(stage.total for stage in stages), _host(run, facts, stages, gpu)
    disk = copies * checkpoint_bytes(run, facts)
    return StageNeed("train", layout.nodes, layout.gpus_per_node, fullest, resident, disk, seconds)


def _host(run: Run, facts: ModelFacts, stages: tuple[StageMemory, ...], gpu: Gpu) -> int:
    """Return the bytes of the fullest host of a training at its peak, while a checkpoint is written."""
    if not gpu.cuda:
        return _fullest_host(run, [stage.total for stage in stages])
    cut, every = grid(run.layout, run.train), [one.trained for one in memory.holdings(run, facts, {})]
    return _fullest_host(run, [RANK + states.saving(run, cut, *of) + states.host_bytes(run, cut, *of) for of in every])


def _fullest_host(run: Run, each: list[int]) -> int:
    """Return the bytes of the fullest host. `each` has the bytes of a rank of each pipeline stage."""
    here = run.layout.gpus_per_node
    ranks = [each[rank * run.layout.pp // run.world] for rank in range(run.world)]
    return max(sum(ranks[first : first + here]) for first in range(0, run.world, here))


def _reinforcement(
    run: Run, facts: ModelFacts, stages: tuple[StageMemory, ...], gpu: Gpu, rollout: Rollout
) -> StageNeed:
    """Return the needs of reinforcement learning. Training and vLLM may share GPUs; the host's memory holds both."""
    need = _training(reinforcement.as_training(run), facts, stages, None, gpu)
    phases = rollout.seconds
    seconds = None if phases is None else BEGINNING + load(run, facts) + run.reinforce.steps * phases.step
    asked, share = run.reinforce, takes(run, "reinforce")
    engines = asked.engines * rollout.way.tp * (OF_VLLM if gpu.cuda else rollout.memory.weights + GIB + 2 * PROCESS)
    training = need.memory + held(run) * run.layout.gpus_per_node
    memory = max(training, engines) if asked.hosts else training + engines
    gpu_memory = max(rollout.trains, rollout.awake)
    return StageNeed("reinforce", share.hosts, share.gpus or 0, gpu_memory, memory, need.disk, seconds)


def _export(run: Run, facts: ModelFacts, merged: int) -> StageNeed:
    formats = run.export.formats or (("merged",) if run.adapter.kind == "none" else ("merged", "adapter"))
    whole = merged if "merged" in formats else 0
    # PEFT's files have an adapter for each expert, even if all experts of a layer share one
    each = run.changed(adapter={"experts": "each"})
    written = whole + (_trained(each, facts) * states.byte(run.train) if "adapter" in formats else 0)
    return _writing("export", run, written)


def _writing(stage: str, run: Run, written: int) -> StageNeed:
    """Return the needs of a stage that reads weights and writes others."""
    here = on_one_host(run)
    seconds = START + written / min(EXPORT * here.world, READ / 2)
    return StageNeed(stage, 1, 0, 0, 2 * FILE * here.world, written, seconds)


def _evaluation(run: Run, facts: ModelFacts, gpu: Gpu, serving: Serving | None) -> StageNeed:
    if serving is None:  # on a CPU, where vLLM's cache is 1 GiB (trainer/serving/engine.py)
        byte = BYTES[precision(run)]
        return StageNeed("evaluate", 1, 0, 0, parameters.total(facts) * byte + GIB + 2 * PROCESS, 0)
    way = serving.way
    seconds = duration(run, facts, gpu, serving) if serving.lacks <= 0 else None
    return StageNeed("evaluate", way.hosts, way.tp, serving.memory.taken, OF_VLLM * way.tp, 0, seconds)


def _cost(run: Run, gpu: Gpu, need: StageNeed) -> float | None:
    """Return the price of a stage: its time on all GPUs of its hosts, at least on those of the flow's host."""
    if gpu.price is None or need.seconds is None:
        return None
    return need.seconds / 3600 * need.hosts * max(need.gpus, run.layout.gpus_per_node) * gpu.price


def _trained(run: Run, facts: ModelFacts) -> int:
    """Return the trained parameters of the whole model. Each adapter counts once, however tp cuts it."""
    if run.adapter.kind == "none":
        return parameters.total(facts)
    run = run.changed(layout={"tp": 1, "sp": False, "etp": 1})
    found, experts_of = 0, 1 if run.adapter.experts == "shared" else run.layout.ep
    for stage in parameters.stages(run, facts):
        dense, expert = parameters.trainable(run, facts, stage)
        found += dense + expert * experts_of
    return found
