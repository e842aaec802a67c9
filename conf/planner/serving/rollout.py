"""vLLM next to the training that sends it weights, in reinforcement learning: memory of its GPU, and time of a step.

    of(run, facts, gpu) -> Rollout       its memory, and seconds of each phase of a step
    unanswered(run, facts, gpu)          why prompts cannot be answered there, with keys that mend it; or ""

vLLM is on the first GPU of the training, or each engine on several (reinforce.engine_gpus, in_turn). While it answers,
training keeps its permanent memory there and frees the rest; while training computes, vLLM sleeps. Or each engine has
separate GPUs (reinforce.engine_gpus): engines share the prompts, get their weights one after another, and answer while
training computes if reinforce.staleness permits it. On several GPUs, each has a part of the weights, and of keys and
values. The cache has room for all answers of a step at full length, or for fewer; with less than one row nothing is
answered.

TRANSFER and PROBE were measured on an H200 with 3.21 GB of a Qwen3-MoE (benchmarks/gpu/reinforcement.py, 23 November
2026); ANSWERED, which vLLM's host takes for a token of each of 256 rows, with 9.63 GB (25 November). All else is
arithmetic.
HELD was measured with answers of 4096 tokens. Training over several hosts sends the first one its missing tensors,
one by one, over one GPU's network.

Not covered: rewards, answers that wait for a slow one. Nothing was measured with vLLM on several GPUs, nor over several
hosts, and a network between hosts of vLLM's own is taken to be as fast as what lies between two GPUs.
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

# Bytes/s from Megatron's layout into vLLM's, on one GPU; files and nccl are guesses, and
# most of nccl is the export as well.
TRANSFER = {"ipc": 10.3 * GB, "nccl": 10.3 * GB, "gloo": 0.62 * GB, "files": 0.62 * GB}
PROBE = 0.18  # seconds
BEGINNING = 60.0  # seconds until vLLM has compiled, and both can begin
ANSWERED = 12e-6  # seconds for a row's token, on the host
HELD = 170  # bytes of an answer's token, in lists of Python's and in the line of the journal that is made of them
BUCKETS = int(1.1 * GB)  # what weights go through: two of trainer/reinforcement/transfer/wire.py, and what digests take


@dataclass(frozen=True)
class Seconds:
    """Seconds of the phases of a step."""

    transfer: float
    probe: float
    generate: float
    train: float
    beside: bool = False  # whether answers are given while training computes

    @property
    def phases(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("transfer", "probe", "generate", "train")}

    @property
    def step(self) -> float:
        both = max if self.beside else lambda *seconds: sum(seconds)
        return self.transfer + self.probe + both(self.generate, self.train)


@dataclass(frozen=True)
class Rollout:
    """vLLM on GPUs of a training, or on separate ones: bytes are those of each GPU."""

    way: Way
    memory: ServedMemory
    row: int  # tokens of a prompt and its longest answer
    beside: int  # bytes that training holds there meanwhile
    trains: int  # bytes that it holds while vLLM sleeps, at most
    engines: int = 1
    alone: bool = False  # whether vLLM's GPUs are none of training's
    seconds: Seconds | None = None  # None if no time is predicted

    @property
    def gpus(self) -> int:
        """GPUs of vLLM's own."""
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
        """Bytes that vLLM is given for keys and values."""
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
    """vLLM next to a training whose layout is legal."""
    asked, trained = run.reinforce, as_training(run)
    byte, sequences = BYTES[run.train.precision], min(SEQUENCES, asked.prompts * asked.samples)
    alone = run.adapter if asked.transport == "adapter" else None
    way = Way(cut(run), byte=byte, adapter=alone, sequences=sequences, tokens=tokens_of_a_step(facts, byte, sequences))
    way = replace(way, expert_parallel=way.tp > 1 and has_whole_experts(facts, way.tp))
    its_own = not in_turn(run)
    stages = training.memory(trained, facts, gpu)
    # Pipeline stages that share GPUs with vLLM: the first stage has the first GPUs.
    taken, world = asked.engines * way.tp, run.layout.world
    shared = 1 if its_own else ceil(min(taken, world) * len(stages) / world)
    beside = 0 if its_own else max(map(_kept, stages[:shared]))
    trains = max(stage.total for stage in stages[:shared])
    found = Rollout(way, memory(facts, way, gpu), run.data.seq_length, beside, trains, engines(run), its_own)
    if not gpu.cuda or found.lacks > 0:
        return found
    return replace(found, seconds=_seconds(run, trained, facts, gpu, found))


def _kept(stage: training.StageMemory) -> int:
    """Bytes of a GPU that training keeps while it computes nothing."""
    trained = stage.weights + stage.gradients + stage.optimizer + stage.adapters + stage.copies
    return trained + stage.buffers + stage.context


def _seconds(run: Run, trained: Run, facts: ModelFacts, gpu: Gpu, found: Rollout) -> Seconds:
    asked = run.reinforce
    rows = ceil(asked.prompts / found.engines) * asked.samples
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
        generate=ceil(rows / together) * asked.max_tokens * token,
        train=timing(trained, facts, gpu).likely * asked.updates,
        beside=asked.staleness > 0,
    )


def _away(run: Run, facts: ModelFacts, byte: float) -> float:
    """Bytes of the weights that the first host of training gets from others."""
    layout, each = run.layout, run.layout.gpus_per_node
    stages = max(1, layout.pp * each // layout.world)  # of a pipeline, on the first host
    whole, kinds = parameters.total(facts), facts.kinds
    experts = sum(parameters.parts(facts, kind)["experts"] for kind in kinds)
    dense_here = min(1.0, each / layout.tp)
    experts_here = min(1.0, each / (layout.ep * layout.etp))
    return (whole - (dense_here * (whole - experts) + experts_here * experts) * stages / layout.pp) * byte


def held(run: Run) -> int:
    """Bytes that a step's answers take in each process that trains, at full length."""
    asked = run.reinforce
    return asked.prompts * asked.samples * asked.max_tokens * HELD


def unanswered(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """The reason why prompts cannot be answered next to a legal training, and what helps; "" if they can."""
    if not gpu.cuda:
        return uncut(run, facts) or _unheld(run, gpu)
    why = _lack(run, facts, gpu)
    mends = [*_mends(run, facts, gpu)] if why else []
    instead = f"These fit: {', or '.join(mends)}" if mends else f"Nor do {gpu.per_host} hold it"
    return f"{why}. {instead}" if why else ""


def _lack(run: Run, facts: ModelFacts, gpu: Gpu) -> str:
    """The reason against this number of GPUs, or the bytes that each lacks; "" if there is no reason."""
    if reason := uncut(run, facts):
        return reason
    here, trained = of(run, facts, gpu), run.layout.gpus_per_node
    if here.alone and not run.reinforce.hosts and trained + here.gpus > gpu.per_host:
        of_host = f"a host of {gpu.name} has {gpu.per_host}"
        return f"{here.gpus} GPUs of vLLM's behind the {trained} of training, and {of_host}"
    if here.lacks <= 0:
        return ""
    each = f"each of {here.way.tp}" if here.way.tp > 1 else "one"
    why = f"{each} {gpu.name} has {here.memory.weights / GB:.1f} GB of weights in vLLM"
    why += "" if here.alone else f" beside {here.beside / GB:.1f} GB of training"
    return why + f", and {here.lacks / GB:.1f} GB are missing for one answer"


def _unheld(run: Run, gpu: Gpu) -> str:
    """The reason why this host's memory does not hold a step's answers; "" if it does."""
    asked, bytes_ = run.reinforce, held(run) * run.layout.gpus_per_node
    if bytes_ <= gpu.memory:
        return ""
    answers = f"{asked.prompts:,} prompts with {asked.samples} answers of {asked.max_tokens} tokens"
    room = f"{bytes_ / GB:.1f} GB in the processes that train, of {gpu.memory / GB:.1f} on this host"
    return f"{answers} take {room}"


def _mends(run: Run, facts: ModelFacts, gpu: Gpu) -> Iterator[str]:
    """Overrides with which vLLM has room for an answer: those that change least come first."""
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
    """The run with just enough GPUs for an engine: training's, more on that host, or those of another host."""
    asked, layout = run.reinforce, run.layout
    own = layout.gpus_per_node if asked.hosts else gpu.per_host - layout.gpus_per_node
    places: list[tuple[dict[str, int | None], int, int]] = []
    places.append(({"in_turn": None}, own, 1 if in_turn(run) else cut(run) + 1))
    if not asked.hosts:
        places.append(({"in_turn": None, "hosts": 1}, layout.gpus_per_node, 1))
        if not asked.staleness:
            places.insert(0, ({"in_turn": True}, layout.gpus_per_node, cut(run) + 1 if in_turn(run) else 2))
    for place, room, fewest in places:
        for count in range(fewest, min(gpu.per_host, room // asked.engines) + 1):
            keys = place | {"engine_gpus": count}
            tried = run.changed(reinforce=keys)
            if not _lack(tried, facts, gpu):
                said = {"in_turn": "true", "hosts": "1"}
                more = [f"reinforce.{key}={said[key]}" for key, value in keys.items() if value and key in said]
                yield " ".join([f"reinforce.engine_gpus={count}", *more]), tried
                break
