"""vLLM in reinforcement learning, next to the training that sends it weights: memory of its GPU, and time of a step.

    of(run, facts, gpu) -> Rollout       the memory of vLLM, and seconds of each phase of a step
    unanswered(run, facts, gpu)          why vLLM cannot answer prompts, with keys that help; or ""

vLLM shares the first GPU of the training, or each engine shares several (reinforce.engine_gpus, in_turn). While vLLM
answers, training keeps its permanent memory on these GPUs and frees the rest; while training computes, vLLM sleeps. Or
each engine has separate GPUs (reinforce.engine_gpus): engines share the prompts, get their weights one after another,
and answer while training computes if reinforce.staleness permits it. On several GPUs, each has a part of weights, keys
and values. The cache has room for all answers of a step at full length, or for fewer; it must hold at least one row.

TRANSFER and PROBE were measured on an H200 with 3.21 GB of a Qwen3-MoE (benchmarks/gpu/reinforcement.py, 23 November
2026). ANSWERED, the time of vLLM's host for a token of each of 256 rows, was measured with 9.63 GB (25 November), HELD
with answers of 4096 tokens. Everything else is computed. Training over several hosts sends the first host its missing
tensors, one by one, over one GPU's network.

Not covered: rewards, answers that wait for a slow one. Nothing was measured with vLLM on several GPUs or several hosts.
A network between separate hosts of vLLM is assumed to be as fast as the link between two GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from conf.model_facts import ModelFacts
from conf.planner import memory as training
from conf.planner import parameters
from conf.planner.hardware import GB, GPUS, NETWORK, Gpu
from conf.planner.rates import HBM
from conf.planner.serving.duration import LAYER
from conf.planner.serving.layout import SEQUENCES
from conf.planner.serving.memory import BLOCK, UTILIZATION, ServedMemory, Way, memory, tokens_of_a_step
from conf.planner.timing import timing
from conf.planner.traffic import LATENCY
from conf.rules.layout import problems
from conf.rules.reinforcement import as_training, cut, engines, in_turn, transport, uncut
from conf.rules.serving import BYTES, has_whole_experts
from conf.schema.run import Run
from conf.schema.sections import Adapter

# Bytes/s from Megatron's layout into vLLM's, on one GPU. files and nccl are guesses; most of the time of nccl is
# the export, too.
TRANSFER = {"ipc": 10.3 * GB, "nccl": 10.3 * GB, "gloo": 0.62 * GB, "files": 0.62 * GB}
PROBE = 0.18  # seconds
BEGINNING = 60.0  # seconds until vLLM has compiled and both can begin
ANSWERED = 12e-6  # seconds of the host for a token of a row
HELD = 170  # bytes of an answer's token, in Python's lists and in the line of the journal
BUCKETS = int(1.1 * GB)  # buffers for weights: two of trainer/reinforcement/transfer/wire.py, and the memory of digests


@dataclass(frozen=True)
class Seconds:
    """Seconds of the phases of a step."""

    transfer: float
    probe: float
    generate: float
    train: float
    beside: bool = False  # whether vLLM answers while training computes

    @property
    def phases(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("transfer", "probe", "generate", "train")}

    @property
    def step(self) -> float:
        both = max if self.beside else lambda *seconds: sum(seconds)
        return self.transfer + self.probe + both(self.generate, self.train)


@dataclass(frozen=True)
class Rollout:
    """vLLM on GPUs of a training, or on separate GPUs. All figures are bytes of each GPU."""

    way: Way
    memory: ServedMemory
    row: int  # tokens of a prompt and its longest answer
    beside: int  # bytes that training holds on the GPU meanwhile
    trains: int  # bytes that training holds while vLLM sleeps, at most
    engines: int = 1
    alone: bool = False  # whether vLLM has separate GPUs
    seconds: Seconds | None = None  # None if no time is predicted

    @property
    def gpus(self) -> int:
        """Number of separate GPUs for vLLM."""
        return self.engines * self.way.tp * self.alone

    @property
    def room(self) -> int:
        """Bytes that are left for keys and values."""
        return int(self.memory.capacity * UTILIZATION) - self.memory.fixed - self.beside - BUCKETS

    @property
    def of_a_row(self) -> int:
        return ceil(self.row / BLOCK) * BLOCK * self.memory.token

    @property
    def cache(self) -> int:
        """Bytes of vLLM's cache of keys and values."""
        return max(0, min(self.room, self.way.sequences * self.of_a_row))

    @property
    def at_once(self) -> int:
        return min(self.way.sequences, self.cache // self.of_a_row)

    @property
    def taken(self) -> int:
        """Bytes that vLLM holds while it answers."""
        return self.memory.fixed + self.cache

    @property
    def awake(self) -> int:
        """Bytes of the GPU while vLLM answers."""
        return self.taken + self.beside + BUCKETS

    @property
    def lacks(self) -> int:
        """Bytes that are missing for one row; a negative number is room."""
        return self.of_a_row - self.room


def of(run: Run, facts: ModelFacts, gpu: Gpu) -> Rollout:
    """Return the plan of vLLM next to a training with a legal layout."""
    section, trained = run.reinforce, as_training(run)
    byte, sequences = BYTES[run.train.precision], min(SEQUENCES, section.prompts * section.samples)
    alone = run.adapter if section.transport == "adapter" else None
    way = Way(cut(run), byte=byte, adapter=alone, sequences=sequences, tokens=tokens_of_a_step(facts, byte, sequences))
    way = replace(way, expert_parallel=way.tp > 1 and has_whole_experts(facts, way.tp))
    separate = not in_turn(run)
    stages = training.memory(trained, facts, gpu)
    # Pipeline stages that share GPUs with vLLM: the first stage has the first GPUs.
    taken, world = section.engines * way.tp, run.layout.world
    shared = 1 if separate else ceil(min(taken, world) * len(stages) / world)
    beside = 0 if separate else max(map(_kept, stages[:shared]))
    trains = max(stage.total for stage in stages[:shared])
    found = Rollout(way, memory(facts, way, gpu), run.data.seq_length, beside, trains, engines(run), separate)
    if not gpu.cuda or found.lacks > 0:
        return found
    return replace(found, seconds=_seconds(run, trained, facts, gpu, found))


def _kept(stage: training.StageMemory) -> int:
    """Return the bytes of a GPU that training keeps while it does not compute."""
    trained = stage.weights + stage.gradients + stage.optimizer + stage.adapters + stage.copies
    return trained + stage.buffers + stage.context


def _seconds(run: Run, trained: Run, facts: ModelFacts, gpu: Gpu, found: Rollout) -> Seconds:
    section = run.reinforce
    rows = ceil(section.prompts / found.engines) * section.samples
    together = min(rows, found.at_once)
    read = (found.memory.weights + together * found.row * found.memory.token) / (gpu.hbm * HBM)
    waits = LAYER[False] + (2 * LATENCY if found.way.tp > 1 else 0)
    token = read + facts.layers * waits + together * ANSWERED
    way = transport(run, gpu.cuda)
    rate = TRANSFER.get(way)
    sent = parameters.total(facts) * found.way.byte * (1 if way == "files" else found.engines)
    return Seconds(
        transfer=(sent / rate if rate else 0.0) + _away(run, facts, found.way.byte) / (gpu.network * NETWORK),
        probe=PROBE,
        generate=ceil(rows / together) * section.max_tokens * token,
        train=timing(trained, facts, gpu).likely * section.updates,
        beside=section.staleness > 0,
    )


def _away(run: Run, facts: ModelFacts, byte: float) -> float:
    """Return the bytes of the weights that the first host of training gets from other hosts."""
    layout, each = run.layout, run.layout.gpus_per_node
    stages = max(1, layout.pp * each // layout.world)  # stages of the pipeline on the first host
    whole, kinds = parameters.total(facts), facts.kinds
    experts = sum(parameters.parts(facts, kind)["experts"] for kind in kinds)
    dense_here = min(1.0, each / layout.tp)
    experts_here = min(1.0, each / (layout.ep * layout.etp))
    return (whole - (dense_here * (whole - experts) + experts_here * experts) * stages / layout.pp) * byte


def held(run: Run) -> int:
    """Return the bytes of a step's answers in each training process, at full length."""
    section = run.reinforce
    return section.prompts * section.samples * section.max_tokens * HELD


def unanswered(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """Return the reason why vLLM cannot answer prompts next to a legal training, with keys that help; "" if it can."""
    if not gpu.cuda:
        return uncut(run, facts) or _unheld(run, gpu)
    why = _lack(run, facts, gpu)
    mends = [*_mends(run, facts, gpu)] if why else []
    instead = f"These fit: {', or '.join(mends)}" if mends else f"{gpu.per_host} GPUs are not enough either"
    return f"{why}. {instead}" if why else ""


def _lack(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """Return the reason against this number of GPUs, or the bytes that each lacks; "" if it fits."""
    if reason := uncut(run, facts):
        return reason
    here, trained = of(run, facts, gpu), run.layout.gpus_per_node
    if here.alone and not run.reinforce.hosts and trained + here.gpus > gpu.per_host:
        of_host = f"a host of {gpu.name} has {gpu.per_host}"
        return f"vLLM needs {here.gpus} GPUs in addition to the {trained} of training, but {of_host}"
    if here.lacks <= 0:
        return ""
    each = f"each of {here.way.tp}" if here.way.tp > 1 else "one"
    why = f"{each} {gpu.name} has {here.memory.weights / GB:.1f} GB of weights in vLLM"
    why += "" if here.alone else f" next to {here.beside / GB:.1f} GB of training"
    return why + f", and {here.lacks / GB:.1f} GB are missing for one answer"


def _unheld(run: Run, gpu: Gpu) -> str:
    """Return the reason why this host's memory does not hold a step's answers; "" if it does."""
    section, bytes_ = run.reinforce, held(run) * run.layout.gpus_per_node
    if bytes_ <= gpu.memory:
        return ""
    answers = f"{section.prompts:,} prompts with {section.samples} answers of {section.max_tokens} tokens"
    room = f"{bytes_ / GB:.1f} GB in the processes that train, of {gpu.memory / GB:.1f} on this host"
    return f"{answers} take {room}"


def _mends(run: Run, facts: ModelFacts, gpu: Gpu) -> Iterator[str]:
    """Yield overrides with which vLLM has room for an answer. Overrides that change least come first."""
    optimizer, adapter = run.optimizer, run.adapter
    ways: list[tuple[str, Run, Gpu]] = []
    if adapter.kind == "none" and not run.reinforce.engine_gpus:
        lora = Adapter(experts="shared") if facts.experts else Adapter()
        named = "adapter.kind=lora adapter.experts=shared" if facts.experts else "adapter.kind=lora"
        away = run.changed(optimizer={"offload": 1.0})
        ways += [("optimizer.offload=1", away, gpu)] if optimizer.offload < 1 else []
        ways.append((named, run.model_copy(update={"adapter": lora}), gpu))
    ways += [(named, tried, gpu) for named, tried in _more_gpus(run, facts, gpu)]
    ways += [(f"hardware.gpu={name}", run, other) for name, other in GPUS.items() if other.memory > gpu.memory]
    for named, tried, on in ways:
        if not problems(as_training(tried), facts, suggest=False) and not _lack(tried, facts, on):
            yield named


def _more_gpus(run: Run, facts: ModelFacts, gpu: Gpu) -> Iterator[tuple[str, Run]]:
    """Yield the run with just enough GPUs for an engine: GPUs of training, more GPUs of its host, or another host's."""
    section, layout = run.reinforce, run.layout
    own = layout.gpus_per_node if section.hosts else gpu.per_host - layout.gpus_per_node
    places: list[tuple[dict[str, int | None], int, int]] = []
    places.append(({"in_turn": None}, own, 1 if in_turn(run) else cut(run) + 1))
    if not section.hosts:
        places.append(({"in_turn": None, "hosts": 1}, layout.gpus_per_node, 1))
        if not section.staleness:
            places.insert(0, ({"in_turn": True}, layout.gpus_per_node, cut(run) + 1 if in_turn(run) else 2))
    for place, room, fewest in places:
        for count in range(fewest, min(gpu.per_host, room // section.engines) + 1):
            keys = place | {"engine_gpus": count}
            tried = run.changed(reinforce=keys)
            if not _lack(tried, facts, gpu):
                texts = {"in_turn": "true", "hosts": "1"}
                more = [f"reinforce.{key}={texts[key]}" for key, value in keys.items() if value and key in texts]
                yield " ".join([f"reinforce.engine_gpus={count}", *more]), tried
                break
